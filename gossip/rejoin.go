package gossip

import (
	"context"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"
)

// Rejoin timing. Seeds that are no members are tried for ever, a few at a
// time, more slowly the longer it is in vain.
const (
	rejoinFirst = time.Second
	rejoinMax   = time.Minute
	rejoinSeeds = 3
	// firstSave is how long members have to turn up before the first of them
	// are kept for the next start.
	firstSave = 30 * time.Second
)

func (p *Pool) loop(ctx context.Context) {
	wait, began, compared := rejoinFirst, time.Now(), false
	lastSave := time.Now().Add(min(firstSave, p.c.SaveInterval) - p.c.SaveInterval)
	t := time.NewTimer(rand.N(rejoinFirst))
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.dirty:
			if wait > rejoinFirst && p.size() < 2 { // nobody is left: not in a minute, but now
				wait = rejoinFirst
				t.Reset(rand.N(rejoinFirst))
			}
			if time.Since(lastSave) >= p.c.SaveInterval && p.save() {
				lastSave = time.Now()
			}
			continue
		case <-t.C:
		}
		missing := p.missing(ctx)
		switch {
		case len(missing) == 0:
			wait = rejoinMax
			if !compared && p.size() > 1 && time.Since(began) > rejoinMax/2 {
				compared = true
				p.compare()
			}
		default:
			if n, _ := p.ml.Join(missing); n > 0 { // its error is in memberlist's log
				wait = rejoinFirst
			}
		}
		if time.Since(lastSave) >= p.c.SaveInterval && p.save() {
			lastSave = time.Now()
		}
		t.Reset(wait/2 + rand.N(wait))
		wait = min(2*wait, rejoinMax)
	}
}

// compare exchanges states with one other member, once, half a minute or more
// after the start: whoever joined through a member that was itself joining just
// then may have been told only to those who knew already, and the next exchange
// of memberlist's own is minutes away.
func (p *Pool) compare() {
	var others []string
	for _, m := range p.Members() {
		if m.NodeID != p.NodeID() {
			others = append(others, m.Addr.String())
		}
	}
	if len(others) > 0 {
		_, _ = p.ml.Join([]string{others[rand.N(len(others))]}) // its error is in memberlist's log
	}
}

// missing are some seeds that are no living members.
func (p *Pool) missing(ctx context.Context) []string {
	have := map[string]bool{}
	for _, m := range p.Members() {
		have[m.Addr.String()] = true
	}
	p.mu.Lock()
	seeds := append(slices.Clone(p.saved), p.c.Seeds()...)
	p.mu.Unlock()
	var out []string
	for _, s := range seeds {
		for _, ap := range p.places(ctx, s) {
			if hp := ap.String(); !have[hp] && !slices.Contains(out, hp) {
				out = append(out, hp)
			}
		}
	}
	rand.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out[:min(len(out), rejoinSeeds)]
}

// resolveWait is how long a seed's name is looked up.
const resolveWait = 5 * time.Second

// places are where a seed is now: an address, with its port or without, or the
// name of a host.
func (p *Pool) places(ctx context.Context, seed string) []netip.AddrPort {
	if ap, err := netip.ParseAddrPort(seed); err == nil {
		return []netip.AddrPort{ap}
	}
	if a, err := netip.ParseAddr(seed); err == nil {
		return []netip.AddrPort{netip.AddrPortFrom(a, Port)}
	}
	host, port := seed, uint64(Port)
	if h, n, err := net.SplitHostPort(seed); err == nil {
		if port, err = strconv.ParseUint(n, 10, 16); err != nil {
			return nil
		}
		host = h
	}
	ctx, cancel := context.WithTimeout(ctx, resolveWait)
	defer cancel()
	found, err := p.c.Resolve(ctx, host)
	if err != nil {
		p.c.Log.Debug("a seed's name is not known now", "seed", seed, "error", err)
		return nil
	}
	var out []netip.AddrPort
	for _, a := range found {
		out = append(out, netip.AddrPortFrom(a.Unmap(), uint16(port)))
	}
	return out
}

// maxSeeds bounds what is kept for the next start; maxGone of them are of
// members that are gone: the way back to the other half of a pool that was cut
// in two for longer than anybody remembers.
const (
	maxSeeds = 16
	maxGone  = 4
)

// save hands out the living members' addresses, and some of those before, if
// they changed.
func (p *Pool) save() bool {
	if p.c.SaveSeeds == nil {
		return false
	}
	self := p.Addr().String()
	var now []string
	for _, m := range p.Members() {
		if a := m.Addr.String(); a != self && !slices.Contains(now, a) {
			now = append(now, a)
		}
	}
	p.mu.Lock()
	var gone []string
	for _, a := range p.saved {
		if a != self && !slices.Contains(now, a) && len(gone) < maxGone {
			gone = append(gone, a)
		}
	}
	slices.Sort(now)
	now = append(now[:min(len(now), maxSeeds-len(gone))], gone...)
	slices.Sort(now)
	same := len(now) == 0 || slices.Equal(now, p.saved)
	if !same {
		p.saved = now
	}
	p.mu.Unlock()
	if same {
		return false
	}
	p.c.SaveSeeds(now)
	return true
}
