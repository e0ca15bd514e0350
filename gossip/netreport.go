package gossip

import (
	"context"
	"net"
	"sync"
	"time"
)

// Dial says whether a server's port answers.
type Dial struct {
	Address string `json:"address"`
	Error   string `json:"error,omitempty"`
}

// NetReport is what one process reaches.
type NetReport struct {
	From string `json:"from"` // the node's or the server's name
	// Address is where this member gossips; "" is without a pool.
	Address string `json:"address,omitempty"`
	Members []Path `json:"members,omitempty"`
	Servers []Dial `json:"servers,omitempty"`
	// Error says why there is no report.
	Error string `json:"error,omitempty"`
}

const dialWait = 3 * time.Second

// NetCheck asks the members of the pool how they are reached, and opens the
// port of every server, at the same time.
func (k *Keeper) NetCheck(ctx context.Context, from string, servers []string) NetReport {
	r := NetReport{From: from, Servers: make([]Dial, len(servers))}
	var wg sync.WaitGroup
	if p, _ := k.current(); p != nil {
		r.Address = p.Addr().String()
		wg.Go(func() { r.Members = p.Check(ctx) })
	}
	for i, a := range servers {
		wg.Go(func() {
			r.Servers[i] = Dial{Address: a}
			d := net.Dialer{Timeout: dialWait}
			c, err := d.DialContext(ctx, "tcp", a)
			if err != nil {
				r.Servers[i].Error = err.Error()
				return
			}
			_ = c.Close()
		})
	}
	wg.Wait()
	return r
}
