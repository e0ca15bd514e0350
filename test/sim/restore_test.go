package sim

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/controlplane"
	"github.com/dunlin-project/dunlin/controlplane/consensus"
	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// images counts what runs on all machines, by image.
func (w *world) images() map[string]int {
	out := map[string]int{}
	for _, h := range w.hosts {
		h.m.mu.Lock()
		for _, p := range h.m.procs {
			if p.st.Phase == workload.Running {
				out[p.image]++
			}
		}
		h.m.mu.Unlock()
	}
	return out
}

// A snapshot is restored after a roll-out: what runs is held on every node,
// over the ends of agents and a power cut without a server, until the restore
// is accepted, one node after the other. Nothing holds where nothing newer
// was seen. The checker is not asked: it believes in one history.
func TestRestoreOfAnOldState(t *testing.T) {
	pulse := &pulse{}
	defer pulse.watch(t.Name())()
	synctest.Test(t, func(t *testing.T) {
		w, err := newWorld(size{1, 3}, 1, pulse)
		must(t, err)
		defer w.close()
		c, err := w.newClient("client")
		must(t, err)
		defer c.close()
		ctx, srv := context.Background(), w.servers[0]
		app := c.newApp("web", 1, 0)
		roll := func(version int) {
			t.Helper()
			must(t, app.put(ctx, want{exists: true, image: image(imageOK, version), replicas: 6}, false))
			sleep(3 * time.Minute)
			if got := w.images(); len(got) != 1 || got[image(imageOK, version)] != 6 {
				t.Fatalf("version %d: %v", version, got)
			}
		}
		running := func() (out []string) {
			for _, h := range w.hosts {
				out = append(out, h.m.running()...)
			}
			return out
		}
		save := func(name string) string {
			t.Helper()
			var b bytes.Buffer
			must(t, consensus.WriteImage(srv.now().Consensus().State().Image(), w.dir, &b))
			path := filepath.Join(w.dir, name)
			must(t, os.WriteFile(path, b.Bytes(), 0o600))
			return path
		}
		restore := func(file string) {
			t.Helper()
			srv.down()
			srv.setFault(nil)
			_, err := controlplane.Restore(ctx, srv.dir, file, w.logger("restore"))
			must(t, err)
			srv.up()
			sleep(2 * time.Minute)
		}
		held := func() (names []string) {
			for _, h := range w.hosts {
				var n corev1.Node
				_, _, err := c.call(ctx, http.MethodGet, "/api/v1/nodes/"+h.name, jsonType, nil, &n)
				must(t, err)
				if slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
					return c.Type == manifests.ConditionHeldAfterRestore && c.Status == corev1.ConditionTrue && strings.Contains(c.Message, "accept-restore "+h.name)
				}) {
					names = append(names, h.name)
				}
			}
			return names
		}
		roll(1)
		old := save("old")
		before := running()
		restore(old)
		if got := running(); !slices.Equal(got, before) || len(held()) > 0 {
			t.Errorf("nothing newer: held on %v, %v run, %v ran", held(), got, before)
		}

		roll(2)
		hosts := 0
		for _, h := range w.hosts {
			if len(h.m.running()) > 0 {
				hosts++
			}
		}
		newer := running()
		same := func(when string) {
			t.Helper()
			if got := running(); !slices.Equal(got, newer) {
				t.Fatalf("%s: %v run, %v ran: %v", when, got, newer, w.images())
			}
		}
		// A second restore of the file: an epoch that it does not know is between.
		restore(old)
		same("restored")
		if got := held(); len(got) != hosts {
			t.Errorf("held on %v of %d", got, hosts)
		}
		for _, h := range w.hosts {
			h.down()
		}
		sleep(time.Second)
		for _, h := range w.hosts {
			h.up()
		}
		sleep(time.Minute)
		same("agents restarted")
		srv.down()
		for _, h := range w.hosts {
			h.down()
			h.m.powerCut()
			h.up()
		}
		sleep(time.Minute)
		same("started without a server")
		srv.up()
		sleep(2 * time.Minute)
		same("the server is back")
		for i, name := range held() {
			patch := map[string]any{"metadata": map[string]any{"annotations": map[string]any{manifests.AnnotationAcceptRestore: fmt.Sprint(srv.now().Consensus().Epoch())}}}
			_, code, err := c.call(ctx, http.MethodPatch, "/api/v1/nodes/"+name, "application/merge-patch+json", patch, nil)
			must(t, err)
			if code != http.StatusOK {
				t.Fatalf("accept: %d", code)
			}
			sleep(2 * time.Minute)
			if left := held(); len(left) != hosts-i-1 {
				t.Errorf("held on %v after %d were accepted", left, i+1)
			}
		}
		if got := w.images(); len(got) != 1 || got[image(imageOK, 1)] != 6 {
			t.Errorf("accepted: %v", got)
		}
	})
}
