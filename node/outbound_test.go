package node

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/runtime/workload"
	"github.com/dunlin-project/dunlin/wire"
)

// What a guest was refused is one event of its pod that names the annotation;
// another one comes only when there is more.
func TestRefusalsAreOneEvent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.link.put("Pod", wasmPod("a"))
		b.start()
		defer b.stop()
		b.after(time.Second)
		b.want("uid-a", "Running+Ready")
		refuse := func(list ...workload.Refusal) {
			b.rt.mu.Lock()
			defer b.rt.mu.Unlock()
			b.rt.states[workload.ID{PodUID: "uid-a", Container: "main"}].Refused = list
		}
		told := func() (out []wire.EventReport) {
			b.link.mu.Lock()
			defer b.link.mu.Unlock()
			for _, e := range b.link.events {
				if e.Reason == "OutboundRefused" {
					out = append(out, e)
				}
			}
			return out
		}
		one := workload.Refusal{What: "a connection to 192.0.2.1:80 (tcp)", Why: "no entry of the annotation has it", Entry: "192.0.2.1:80"}
		two := workload.Refusal{What: "the name x.test", Why: "no entry of the annotation has it", Entry: "x.test:443"}
		refuse(one, two)
		b.after(10 * time.Minute)
		list := told()
		if len(list) != 1 || !strings.Contains(list[0].Message, `annotate the pod with dunlin.dev/outbound: "192.0.2.1:80, x.test:443"`) || !strings.Contains(list[0].Message, one.What) {
			t.Fatalf("%+v", list)
		}
		refuse(one, two, workload.Refusal{What: "the name y.test", Why: one.Why, Entry: "y.test:443"})
		b.after(10 * time.Minute)
		if list := told(); len(list) != 2 || !strings.Contains(list[1].Message, "y.test:443") {
			t.Fatalf("%+v", list)
		}
	})
}
