package leader

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// elector leads in turns, as told.
type elector struct {
	terms chan context.Context
	term  uint64
	fail  int // barriers to refuse
}

func (e *elector) Lead(ctx context.Context, f func(context.Context, uint64) error) error {
	for {
		select {
		case term, ok := <-e.terms:
			if !ok {
				return errors.New("halted")
			}
			e.term++
			if err := f(term, e.term); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (e *elector) Barrier(context.Context) error {
	if e.fail > 0 {
		e.fail--
		return errors.New("no quorum")
	}
	return nil
}

type trace struct {
	mu    sync.Mutex
	lines []string
}

func (t *trace) add(s string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lines = append(t.lines, s)
}

func (t *trace) component(name string, stop time.Duration) Component {
	ready := make(chan struct{}, 1)
	return Component{
		Name: name,
		Run: func(ctx context.Context, _ uint64) error {
			t.add("+" + name)
			ready <- struct{}{}
			<-ctx.Done()
			time.Sleep(stop)
			t.add("-" + name)
			return nil
		},
		Ready: func(context.Context) error { <-ready; return nil },
	}
}

func TestOrderAndTeardown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &elector{terms: make(chan context.Context), fail: 3}
		var tr trace
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			done <- Run(ctx, e, slog.New(slog.DiscardHandler), tr.component("a", 3*time.Second), tr.component("b", time.Second))
		}()
		term1, lose := context.WithCancel(ctx)
		e.terms <- term1
		time.Sleep(time.Minute)
		lose()
		e.terms <- ctx // taken only once everything of term 1 has ended
		time.Sleep(time.Minute)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		want := []string{"+a", "+b", "-b", "-a", "+a", "+b", "-b", "-a"}
		if !slices.Equal(tr.lines, want) {
			t.Errorf("got %v, want %v", tr.lines, want)
		}
	})
}

func TestFailingComponent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &elector{terms: make(chan context.Context)}
		starts := 0
		bad := Component{Name: "bad", Run: func(context.Context, uint64) error {
			starts++
			switch starts % 3 {
			case 0:
				panic("defect")
			case 1:
				return errors.New("failed")
			}
			return nil
		}}
		var tr trace
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- Run(ctx, e, slog.New(slog.DiscardHandler), bad, tr.component("good", 0)) }()
		e.terms <- ctx
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		// Doubling from 0.1 s to 30 s with jitter: some thirty starts.
		if starts < 20 || starts > 60 {
			t.Errorf("%d starts in ten minutes", starts)
		}
		if !slices.Equal(tr.lines, []string{"+good"}) {
			t.Errorf("the good one was disturbed: %v", tr.lines)
		}
		cancel()
		<-done
	})
}

func TestElectorGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &elector{terms: make(chan context.Context)}
		close(e.terms)
		if err := Run(t.Context(), e, slog.New(slog.DiscardHandler)); err == nil {
			t.Error("no error")
		}
	})
}
