package ingress

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/dunlin-project/dunlin/node/companion"
	"github.com/dunlin-project/dunlin/node/services"
	"github.com/dunlin-project/dunlin/wire"
)

// lookAt is how often the process is asked which ports it could not open.
const lookAt = 10 * time.Second

// Supervisor is the agent's side: it keeps a process while this node serves
// Ingresses and there are any, and none otherwise.
type Supervisor struct {
	// Dir, in the run-time folder, holds the process's socket and log.
	Dir   string
	Table *services.Table
	// Secrets of the node's assignment; Changed is signalled when they may be
	// others.
	Secrets  Secrets
	Changed  <-chan struct{}
	Settings func() Settings
	Log      *slog.Logger

	tag string // tells builds of one file apart, in tests
}

// Run until ctx ends. The process goes on.
func (s *Supervisor) Run(ctx context.Context) error {
	sub := s.Table.Subscribe()
	defer sub.Close()
	stop, items := func() {}, map[string]bool{}
	defer func() { stop() }()
	// A process that is there knows more than a table that was saved some time
	// ago: it is left alone until a server was heard.
	_, err := Ask(s.Dir)
	there, running := err == nil, false
	for {
		s.note(sub, items)
		wanted := s.serves() && len(items) > 0
		switch {
		case there && !s.Table.Fresh():
		case wanted && !running:
			stop, running, there = s.start(ctx), true, true
		case !wanted && (running || there):
			stop()
			stop, running, there = func() {}, false, false
			if err := companion.Retire(s.Dir); err != nil {
				s.Log.Warn("ingress is not ended", "error", err)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-sub.News():
		}
	}
}

// note keeps which Ingresses there are.
func (s *Supervisor) note(sub *services.Subscription, items map[string]bool) {
	for more := true; more; {
		var put []wire.ServiceItem
		var gone []string
		put, gone, more = sub.Take(1 << 20)
		for _, it := range put {
			if strings.HasPrefix(it.Key, wire.ItemIngress) {
				items[it.Key] = true
			}
		}
		for _, k := range gone {
			delete(items, k)
		}
	}
}

// serves says whether this node is chosen.
func (s *Supervisor) serves() bool {
	var n wire.IngressNodes
	data := s.Table.Get(wire.ItemIngressNodes)
	return data != nil && wire.DecodeItem(data, &n) == nil && slices.Contains(n.Nodes, s.Settings().Node)
}

func (s *Supervisor) companion() *companion.Supervisor[Settings] {
	return &companion.Supervisor[Settings]{
		Program: argv0, Dir: s.Dir, Log: s.Log, Tag: s.tag,
		Settings:  func() (Settings, bool) { return s.Settings(), true },
		Equal:     func(a, b *Settings) bool { return *a == *b },
		Subscribe: func() companion.Feed { return newFeed(s.Table, s.Secrets, s.Changed) },
		Known:     func() bool { return s.Table.Generation() != 0 },
	}
}

// start runs the process until the function that it returns was called.
func (s *Supervisor) start(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{}, 2)
	go func() {
		if err := s.companion().Run(ctx); err != nil {
			s.Log.Error("Ingresses are not served", "error", err)
		}
		done <- struct{}{}
	}()
	go func() {
		s.look(ctx)
		done <- struct{}{}
	}()
	return func() {
		cancel()
		<-done
		<-done
	}
}

// look tells of ports that are taken, once.
func (s *Supervisor) look(ctx context.Context) {
	t := time.NewTicker(lookAt)
	defer t.Stop()
	told := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		st, err := Ask(s.Dir)
		if err != nil {
			continue
		}
		text := ""
		for _, place := range slices.Sorted(maps.Keys(st.Failures)) {
			text += place + ": " + st.Failures[place] + "; "
		}
		if text != told && text != "" {
			s.Log.Warn("ports of Ingresses are not served: free them, or choose others with --ingress-http and --ingress-https", "reasons", strings.TrimSuffix(text, "; "))
		}
		told = text
	}
}
