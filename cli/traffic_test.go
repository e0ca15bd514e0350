package cli

import (
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
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
