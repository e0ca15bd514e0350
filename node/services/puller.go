package services

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"time"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/wire"
)

const (
	pullTimeout = 30 * time.Second
	pullFirst   = 200 * time.Millisecond
	pullMax     = 30 * time.Second
	// Writes to the disk are bounded by a rate: a table that changes all day
	// costs a KiB a second, one that does not change nothing. A power cut loses
	// the changes since the last one, so a small table, as most sites have, is
	// saved soon.
	saveRate  = 1 << 10 // bytes a second
	saveLeast = 10 * time.Second
	saveMost  = 10 * time.Minute
)

// saveAfter is how long after a write of so many bytes the next may come.
func saveAfter(bytes int) time.Duration {
	return min(max(time.Duration(bytes)*time.Second/saveRate, saveLeast), saveMost)
}

// Link asks the control plane; *link.Link is one.
type Link interface {
	Services(ctx context.Context, r wire.ServicesRequest) (*wire.ServicesReply, error)
	ServiceHints() <-chan struct{}
	Connected() bool
}

// Puller keeps a Table current and saved.
type Puller struct {
	Table *Table
	Link  Link
	// Path of the file for a boot without a network; "" is none.
	Path string
	Log  *slog.Logger

	saved   uint64 // digest of what the file holds
	savedAt time.Time
	size    int  // of the file, in bytes, as it was written last
	ever    bool // something was saved since the start
}

// saved is the file: the table as the server gave it.
type saved struct {
	Generation uint64             `cbor:"1,keyasint"`
	Items      []wire.ServiceItem `cbor:"2,keyasint,omitempty"`
}

// Load reads what was saved; a missing or damaged file is an empty table.
func (p *Puller) Load() {
	if p.Path == "" {
		return
	}
	b, err := atomicfile.Read(p.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var s saved
	if err == nil {
		err = wire.DecodeItem(b, &s)
	}
	if err != nil {
		p.Log.Warn("the saved service table cannot be used; services answer once a server was reached", "path", p.Path, "error", err)
		if !errors.Is(err, fs.ErrPermission) {
			_ = os.Remove(p.Path) // a copy of what every server has
		}
		return
	}
	t := p.Table
	t.mu.Lock()
	defer t.mu.Unlock()
	t.take(&wire.ServicesReply{Generation: s.Generation, Items: s.Items})
	p.saved = t.digest
}

// Save writes the table if the file holds another.
func (p *Puller) Save() error {
	t := p.Table
	t.mu.Lock()
	digest, s := t.digest, saved{Generation: t.gen}
	if p.Path == "" || digest == p.saved || t.gen == 0 {
		t.mu.Unlock()
		return nil
	}
	for k, v := range t.items {
		s.Items = append(s.Items, wire.ServiceItem{Key: k, Data: v})
	}
	t.mu.Unlock()
	b, err := wire.EncodeItem(&s)
	if err != nil {
		return err
	}
	if err := atomicfile.Write(p.Path, b, 0o600); err != nil {
		return fmt.Errorf("save the service table: %w", err)
	}
	p.saved, p.savedAt, p.ever, p.size = digest, time.Now(), true, len(b)
	return nil
}

// Run pulls whenever there is a hint, until ctx ends; then the table is saved
// once more. While there is no connection it waits: a new one is a hint.
func (p *Puller) Run(ctx context.Context) error {
	fails, due := 0, time.Duration(0) // due: until the next try; negative is none
	var told string
	for {
		if due == 0 {
			due = -1
			err := p.pull(ctx)
			var fault *wire.Fault
			switch {
			case ctx.Err() != nil:
			case err == nil:
				fails, told = 0, ""
			case errors.As(err, &fault) && fault.Code == wire.FaultUnsupported:
				p.tell(&told, "the servers are older than this node and send no service table", err)
			case errors.Is(err, ErrDiverged):
				due = pullFirst
			case p.Link.Connected():
				p.tell(&told, "service table not pulled", err)
				due = min(pullFirst<<min(fails, 10), pullMax)
				due += rand.N(due/2 + 1)
				fails++
			}
		}
		save := p.saveDue()
		if save == 0 {
			if err := p.Save(); err != nil {
				p.tell(&told, "service table not saved", err)
				p.savedAt, p.ever = time.Now(), true // again in a while
			}
			continue
		}
		began := time.Now()
		hinted, ok := p.sleep(ctx, due, save)
		if !ok {
			return p.Save()
		}
		if hinted {
			due = 0
		} else if due > 0 {
			due = max(due-time.Since(began), 0)
		}
	}
}

func (p *Puller) tell(told *string, msg string, err error) {
	if text := msg + err.Error(); text != *told {
		p.Log.Debug(msg, "error", err)
		*told = text
	}
}

// saveDue is how long until the table has to be saved; negative is never.
func (p *Puller) saveDue() time.Duration {
	t := p.Table
	t.mu.Lock()
	clean := t.digest == p.saved || t.gen == 0 || p.Path == ""
	t.mu.Unlock()
	switch {
	case clean:
		return -1
	case !p.ever:
		return 0
	}
	return max(saveAfter(p.size)-time.Since(p.savedAt), 0)
}

// sleep waits for a hint, or for the sooner of two times that are not
// negative.
func (p *Puller) sleep(ctx context.Context, a, b time.Duration) (hinted, ok bool) {
	if a < 0 || (b >= 0 && b < a) {
		a = b
	}
	var after <-chan time.Time
	if a >= 0 {
		t := time.NewTimer(a)
		defer t.Stop()
		after = t.C
	}
	select {
	case <-ctx.Done():
		return false, false
	case <-p.Link.ServiceHints():
		return true, true
	case <-after:
		return false, true
	}
}

// pull asks until nothing is missing.
func (p *Puller) pull(ctx context.Context) error {
	for {
		pctx, cancel := context.WithTimeout(ctx, pullTimeout)
		r, err := p.Link.Services(pctx, p.Table.Request())
		cancel()
		if err != nil {
			return err
		}
		more, err := p.Table.Apply(r)
		if err != nil || !more {
			return err
		}
	}
}
