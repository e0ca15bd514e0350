package node

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestPodFromAssignmentToGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		pod := wasmPod("a")
		b.link.put("Pod", pod)
		b.start()
		defer b.stop()
		b.after(time.Second)
		st := b.want("uid-a", "Running+Ready")
		if st.PodIP != "10.42.0.1" || st.HostIP != "192.0.2.1" || st.ContainerStatuses[0].ContainerID != "wazero://uid-a/main/0" {
			t.Fatalf("status: %+v", st)
		}
		b.link.put("Pod", deleted(pod, 30))
		b.after(time.Second)
		b.want("uid-a", "Succeeded")
		if !b.link.gone["uid-a"] || len(b.net.pods) != 0 || len(b.vols.pods) != 0 || len(b.rt.states) != 0 {
			t.Fatalf("not gone: %v %v %v %v", b.link.gone, b.net.pods, b.vols.pods, b.rt.states)
		}
		b.link.drop("uid-a")
		b.after(time.Second)
		if g, _ := b.db.Gones(); len(g) != 0 {
			t.Fatalf("tombstones left: %v", g)
		}
		if n := len(b.rt.started()); n != 1 {
			t.Fatalf("%d starts", n)
		}
	})
}
