package link

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
)

// serve runs a full session; leader are the addresses to which a relayed one
// goes.
func (l *Link) serve(ctx context.Context, c *conn, leader []string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wc := wire.NewConn(c, l.handler(ctx, route{c.addr, c.relayed}), wire.Options{
		Initiator: true, Accept: []wire.Type{wire.TypeNudge, wire.TypeStreamRequest}, IdleTimeout: 30 * time.Second,
	})
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { l.leaseLoop(ctx, wc) })
	wg.Go(func() { l.renewLoop(ctx, wc) })
	wg.Go(func() { l.sayAgain(ctx, wc) })
	if c.relayed {
		l.wereSilent(leader)
		wg.Go(func() { l.seekDirect(ctx, wc, leader) })
	}
	l.log.Info("connected to the control plane", "server", c.addr, "relayed", c.relayed)
	l.mu.Lock()
	l.cur, l.failed, l.relayed = wc, "", c.relayed
	l.mu.Unlock()
	l.hint()
	wake(l.table)
	err := wc.Run(ctx)
	l.mu.Lock()
	l.cur, l.relayed = nil, false
	l.mu.Unlock()
	cancel()
	return err
}

// sayAgain repeats what the node last said of itself on every new
// connection, until it is taken: the server that heard it may be gone, or may
// have written "unknown" over it meanwhile. Only what is not known yet is
// written there.
func (l *Link) sayAgain(ctx context.Context, wc *wire.Conn) {
	for try := 0; ; try++ {
		l.mu.Lock()
		if l.lastNode == nil {
			l.mu.Unlock()
			return
		}
		r := *l.lastNode
		l.mu.Unlock()
		reply := new(wire.ReportReply)
		rctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		err := wc.Call(rctx, &r, reply)
		cancel()
		if err == nil && reply.Refused == "" {
			return
		}
		wait := backoff(try, backoffMax)
		l.log.Debug("node status not repeated", "error", err, "refused", reply.Refused, "again_in", wait)
		if !sleep(ctx, wait) {
			return
		}
	}
}

func (l *Link) handler(ctx context.Context, to route) wire.Handler {
	return wire.HandlerFunc(func(_ context.Context, t wire.Type, body []byte) (wire.Message, error) {
		switch t {
		case wire.TypeNudge:
			n := new(wire.Nudge)
			if err := wire.Unmarshal(body, n); err != nil {
				return nil, err
			}
			if n.Services != 0 {
				wake(l.table)
			}
			if n.Generation != 0 || n.Services == 0 {
				l.hint()
			}
		case wire.TypeStreamRequest:
			r := new(wire.StreamRequest)
			if err := wire.Unmarshal(body, r); err != nil {
				return nil, err
			}
			l.openStream(ctx, to, r)
		}
		return nil, nil
	})
}

// renewLoop renews the certificate in good time. It looks at the wall clock
// rather than sleeping until a date, since the clock may jump.
func (l *Link) renewLoop(ctx context.Context, wc *wire.Conn) {
	t := time.NewTicker(renewCheck)
	defer t.Stop()
	for {
		cert := l.c.Identity.Certificate()
		if pki.NeedsRenewal(cert.Leaf, l.c.Clock.Now()) {
			rctx, cancel := context.WithTimeout(ctx, 30*time.Second)
			if err := l.renew(rctx, wc); err != nil && ctx.Err() == nil {
				l.log.Warn("certificate not renewed", "until", cert.Leaf.NotAfter, "error", err)
			}
			cancel()
		}
		select {
		case <-ctx.Done():
			return
		case <-wc.Done():
			return
		case <-t.C:
		}
	}
}

func (l *Link) renew(ctx context.Context, wc *wire.Conn) error {
	csr, err := l.c.Identity.CSR()
	if err != nil {
		return err
	}
	reply := new(wire.RenewReply)
	if err := wc.Call(ctx, &wire.RenewRequest{CSR: csr}, reply); err != nil {
		return fmt.Errorf("link: renew certificate: %w", err)
	}
	if reply.Refused != "" {
		return fmt.Errorf("link: renew certificate: %w: %s", ErrRefused, reply.Refused)
	}
	if err := l.c.Identity.Update(func(g *pki.Grant) { g.Cert = reply.Cert }); err != nil {
		return err
	}
	l.log.Info("certificate renewed", "until", l.c.Identity.Certificate().Leaf.NotAfter)
	return nil
}

// limited serves a connection on which the server allows only Time and
// Renew, since our certificate is outside its dates.
func (l *Link) limited(ctx context.Context, c *conn) error {
	l.log.Info("certificate is outside its dates: renewing", "server", c.addr)
	wc := wire.NewConn(c, nil, wire.Options{Initiator: true})
	done := make(chan error, 1)
	go func() { done <- wc.Run(ctx) }()
	defer func() {
		wc.Close(nil)
		<-done //nolint:errcheck // it was closed here
	}()
	call, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	sent := time.Now()
	tr := new(wire.TimeReply)
	if err := wc.Call(call, &wire.TimeRequest{UnixMilli: l.c.Clock.Now().UnixMilli()}, tr); err != nil {
		return err
	}
	if tr.Trusted {
		l.timeHint(tr.UnixMilli, time.Since(sent)/2)
	}
	if err := l.renew(call, wc); err != nil {
		return err
	}
	return errRenewed
}
