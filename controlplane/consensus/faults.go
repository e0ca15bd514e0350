package consensus

import "sync"

// faults remember what is wrong with the disk: the last failed write, and
// whether the folder is too full for ordinary writes.
type faults struct {
	mu    sync.Mutex
	write error
	full  error
}

func (f *faults) set(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.write = err
}

// clearWrite forgets a failed write, after one that worked.
func (f *faults) clearWrite() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.write = nil
}

// failed is the last write's, nil if it worked.
func (f *faults) failed() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.write
}

func (f *faults) get() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.write != nil {
		return f.write
	}
	return f.full
}

// markFull and clearFull return whether that is news.
func (f *faults) markFull(err error) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	news := f.full == nil
	f.full = err
	return news
}

func (f *faults) clearFull() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	news := f.full != nil
	f.full = nil
	return news
}
