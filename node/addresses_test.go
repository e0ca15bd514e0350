package node

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Pods that run and that the database does not know keep their addresses; who
// turns out to be no pod of the node gives its own back.
func TestAddressesOfPodsWithoutRecords(t *testing.T) {
	const gone, here = "3b9cd4a2-7d54-4a5f-8d10-000000000001", "3b9cd4a2-7d54-4a5f-8d10-000000000002"
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.c.AddressDir = t.TempDir()
		before := &Agent{c: b.c}
		ips := map[string]netip.Addr{gone: netip.MustParseAddr("10.42.0.77"), here: netip.MustParseAddr("10.42.0.78")}
		for uid, ip := range ips {
			_, _ = b.rt.Start(t.Context(), workload.Spec{ID: workload.ID{PodUID: uid, Container: "main"}})
			before.noteAddress(uid, network.Allocation{IP: ip, IPs: []netip.Addr{ip}})
		}
		pod := wasmPod("a")
		pod.UID = here
		b.link.put("Pod", pod)
		b.link.setCut(true)
		b.start()
		defer b.stop()
		b.after(time.Minute)
		for uid := range ips {
			if _, ok := b.net.pods[uid]; !ok {
				t.Errorf("before the assignment is known the address of %s is free", uid)
			}
		}
		b.link.setCut(false)
		b.after(2 * time.Minute)
		if st := b.link.statusOf(here); st.PodIP != ips[here].String() {
			t.Errorf("the pod is at %q", st.PodIP)
		}
		if _, ok := b.net.pods[gone]; ok {
			t.Error("the address of a pod that left is still taken")
		}
		if _, err := os.Stat(filepath.Join(b.c.AddressDir, gone)); err == nil {
			t.Error("the address of a pod that left is still noted")
		}
	})
}
