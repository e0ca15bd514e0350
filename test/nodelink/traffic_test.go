package nodelink

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/wire/memnet"
)

// An idle node's connection, on the wire. TLS bytes are counted; IP and TCP
// headers are added as 52 bytes (IPv4, TCP with timestamps) for each packet:
// a renewal, its answer (which acknowledges the renewal), and the node's
// acknowledgement of the answer.
func TestIdleTraffic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := memnet.New()
		s := startSim(t, n, nil)
		a := runLink(t, s.enroll("n1"), func(c *link.Config) { c.Dial = n.Dialer("n1") })
		time.Sleep(time.Minute)
		in0, out0 := a.Bytes()
		const minutes = 10
		time.Sleep(minutes * time.Minute)
		in1, out1 := a.Bytes()
		const leases = minutes * 60 / 2
		total := (in1 - in0) + (out1 - out0) + 3*52*leases
		perSecond := float64(total) / (minutes * 60)
		t.Logf("idle: %.1f B/s on the wire (%.1f B/s of TLS records: %d in, %d out), %d renewals", perSecond,
			float64((in1-in0)+(out1-out0))/(minutes*60), in1-in0, out1-out0, leases)
		if perSecond > 200 {
			t.Errorf("%.1f B/s, the target is 200", perSecond)
		}
		a.stop()
		s.stop()
	})
}
