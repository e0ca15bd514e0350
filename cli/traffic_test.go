package cli

import (
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/node/services"
	"github.com/dunlin-project/dunlin/wire"
)

// What the kernel refuses of the rules for containers is an event of the node,
// once, taken back when it is over or something else.
func TestRefusedNATIsTold(t *testing.T) {
	var told []string
	var log strings.Builder
	tr := &traffic{log: slog.New(slog.NewTextHandler(&log, nil)), tell: func(reason, message string, over bool) {
		told = append(told, reason+" "+message+map[bool]string{true: " (over)"}[over])
	}}
	first, second := errors.New("no nf_tables"), errors.New("no nft_fib_ipv6")
	for _, err := range []error{nil, first, first, second, nil, nil} {
		tr.lookAtNAT(err)
	}
	want := []string{"NoAddressTranslation no nf_tables", "NoAddressTranslation no nf_tables (over)",
		"NoAddressTranslation no nft_fib_ipv6", "NoAddressTranslation no nft_fib_ipv6 (over)"}
	if !slices.Equal(told, want) {
		t.Errorf("told %q, want %q", told, want)
	}
	if n := strings.Count(log.String(), "level=WARN"); n != 2 {
		t.Errorf("%d lines in the log: %s", n, log.String())
	}
}

// Endpoints come and go all the time: the routes to other nodes are looked at
// for nodes only, and every minute.
func TestRoutesAreLookedAtForNodesOnly(t *testing.T) {
	for key, want := range map[string]time.Duration{"e/default/web-1": time.Minute, wire.ItemNodeInfo + "n1": 2*time.Second + routesGather} {
		synctest.Test(t, func(t *testing.T) {
			tr := &traffic{table: services.NewTable()}
			sub := tr.table.Subscribe()
			defer sub.Close()
			go func() {
				for gen := range uint64(3) {
					time.Sleep(2 * time.Second)
					data := []byte{byte(gen)}
					if _, err := tr.table.Apply(&wire.ServicesReply{Generation: gen + 1, Full: true, Items: []wire.ServiceItem{{Key: key, Data: data}}, Digest: wire.ItemDigest(key, data)}); err != nil {
						t.Error(err)
					}
				}
			}()
			began := time.Now()
			if ok := tr.routesMayHaveChanged(t.Context(), sub, time.Minute); !ok || time.Since(began) != want {
				t.Errorf("%s: %v after %s, want %s", key, ok, time.Since(began), want)
			}
			time.Sleep(10 * time.Second)
		})
	}
}
