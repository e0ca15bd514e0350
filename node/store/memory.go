package store

import (
	"maps"
	"slices"
	"sync"

	"github.com/dunlin-project/dunlin/wire"
)

// Memory is a Store without a disk, for tests and simulation. It keeps
// encoded records, as the real one does, so that nothing is shared.
type Memory struct {
	mu      sync.Mutex
	records map[string]map[string][]byte
	boots   uint64
	writes  uint64
	fail    error
	failAt  uint64
}

// NewMemory makes an empty one.
func NewMemory() *Memory {
	return &Memory{records: map[string]map[string][]byte{
		bucketAssignment: {}, bucketObjects: {}, bucketPods: {}, bucketGone: {},
	}, boots: 1}
}

// Reopen counts a boot, as opening the file again does.
func (m *Memory) Reopen() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.boots++
}

// Writes counts the commits so far.
func (m *Memory) Writes() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.writes
}

// FailAfter lets n more commits through and fails those after with err, as a
// power cut at that point does.
func (m *Memory) FailAfter(n uint64, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fail, m.failAt = err, m.writes+n
}

// FailWrites makes every write fail with err until it is called with nil.
func (m *Memory) FailWrites(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fail, m.failAt = err, 0
}

// Check implements Store.
func (m *Memory) Check() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.writes >= m.failAt {
		return m.fail
	}
	return nil
}

func (m *Memory) update(f func(put func(bucket, key string, v any) error, del func(bucket, key string)) error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil && m.writes >= m.failAt {
		return m.fail
	}
	type change struct {
		bucket, key string
		data        []byte
	}
	var changes []change
	err := f(func(bucket, key string, v any) error {
		b, err := encode(bucket, key, v)
		changes = append(changes, change{bucket, key, b})
		return err
	}, func(bucket, key string) { changes = append(changes, change{bucket, key, nil}) })
	if err != nil {
		return err
	}
	for _, c := range changes {
		if c.data == nil {
			delete(m.records[c.bucket], c.key)
		} else {
			m.records[c.bucket][c.key] = c.data
		}
	}
	m.writes++
	return nil
}

func list[T any](m *Memory, bucket string) ([]T, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []T
	for _, key := range slices.Sorted(maps.Keys(m.records[bucket])) {
		var v T
		if err := decode(bucket, key, m.records[bucket][key], &v); err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, nil
}

// Assignment implements Store.
func (m *Memory) Assignment() (Assignment, error) {
	a := Assignment{Objects: map[string]wire.Object{}}
	h, err := list[header](m, bucketAssignment)
	if err != nil {
		return a, err
	}
	if len(h) == 1 {
		h[0].into(&a)
	}
	objects, err := list[wire.Object](m, bucketObjects)
	for _, o := range objects {
		a.Objects[o.UID] = o
	}
	return a, err
}

// SaveAssignment implements Store.
func (m *Memory) SaveAssignment(a Assignment) error {
	old, err := m.Assignment()
	if err != nil {
		return err
	}
	put, del := changed(old.Objects, a.Objects)
	return m.update(func(w func(string, string, any) error, d func(string, string)) error {
		if err := w(bucketAssignment, keyHeader, headerOf(a)); err != nil {
			return err
		}
		for _, o := range put {
			if err := w(bucketObjects, o.UID, o); err != nil {
				return err
			}
		}
		for _, uid := range del {
			d(bucketObjects, uid)
		}
		return nil
	})
}

// Pods implements Store.
func (m *Memory) Pods() ([]Pod, error) { return list[Pod](m, bucketPods) }

// SavePod implements Store.
func (m *Memory) SavePod(p Pod) error {
	return m.update(func(w func(string, string, any) error, _ func(string, string)) error {
		return w(bucketPods, p.UID, p)
	})
}

// DeletePod implements Store.
func (m *Memory) DeletePod(uid string, gone *Gone) error {
	return m.update(func(w func(string, string, any) error, d func(string, string)) error {
		d(bucketPods, uid)
		if gone == nil {
			return nil
		}
		return w(bucketGone, gone.UID, gone)
	})
}

// Gones implements Store.
func (m *Memory) Gones() ([]Gone, error) { return list[Gone](m, bucketGone) }

// SaveGone implements Store.
func (m *Memory) SaveGone(g Gone) error {
	return m.update(func(w func(string, string, any) error, _ func(string, string)) error {
		return w(bucketGone, g.UID, g)
	})
}

// DeleteGone implements Store.
func (m *Memory) DeleteGone(uid string) error {
	return m.update(func(_ func(string, string, any) error, d func(string, string)) error {
		d(bucketGone, uid)
		return nil
	})
}

// Boots implements Store.
func (m *Memory) Boots() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.boots
}

// Close implements Store.
func (m *Memory) Close() error { return nil }
