package images

import (
	"context"
	"fmt"
	"time"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// place is one of the node's places for pulls. A pull that stands still gives
// it back until it tries again, so that a registry which answers nothing keeps
// nobody else from theirs.
type place struct {
	slots    chan struct{}
	progress workload.Progress
	held     bool
}

// take waits for a place, and says so where there is none.
func (p *Puller) take(ctx context.Context, progress workload.Progress) (*place, error) {
	at := &place{slots: p.slots, progress: progress}
	return at, at.wait(ctx)
}

func (p *place) wait(ctx context.Context) error {
	select {
	case p.slots <- struct{}{}:
		p.held = true
		return nil
	default:
	}
	tell(p.progress, fmt.Sprintf("%swaits until one of the %d pulls under way is over (--max-pulls)", workload.Pulling, cap(p.slots)))
	select {
	case p.slots <- struct{}{}:
		p.held = true
		return nil
	case <-ctx.Done():
		return fmt.Errorf("pull: %w", context.Cause(ctx))
	}
}

// again waits for a place if there is none.
func (p *place) again(ctx context.Context) error {
	if p.held {
		return nil
	}
	return p.wait(ctx)
}

func (p *place) release() {
	if p.held {
		<-p.slots
		p.held = false
	}
}

// rest pauses without the place. What cut the pull off is told.
func (p *place) rest(ctx context.Context, d time.Duration, why error) error {
	tell(p.progress, fmt.Sprintf("%sit stands still, and goes on in %s: %v", workload.Pulling, d.Round(time.Second/10), why))
	p.release()
	if err := pause(ctx, d); err != nil {
		return err
	}
	return p.wait(ctx)
}
