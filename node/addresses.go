package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/fxamacker/cbor/v2"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// What a pod was given of the network is also kept in AddressDir, in memory
// like the processes that use it: a database that is damaged or lost must not
// move the addresses of what runs, since a guest listens where it began to.

func (a *Agent) addressFile(uid string) string { return filepath.Join(a.c.AddressDir, uid) }

// noteAddress notes a pod's allocation.
func (a *Agent) noteAddress(uid string, al network.Allocation) error {
	if a.c.AddressDir == "" || !workload.IsUID(uid) {
		return nil
	}
	b, err := cbor.Marshal(al)
	if err != nil {
		return fmt.Errorf("note the address of pod %s: %w", uid, err)
	}
	file := a.addressFile(uid)
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return fmt.Errorf("note the address of pod %s: %w", uid, err)
	}
	return atomicfile.Write(file, b, 0o600)
}

// addressOf is what noteAddress noted; nil is nothing.
func (a *Agent) addressOf(uid string) *network.Allocation {
	if a.c.AddressDir == "" || !workload.IsUID(uid) {
		return nil
	}
	b, err := atomicfile.Read(a.addressFile(uid))
	al := &network.Allocation{}
	if err == nil {
		err = cbor.Unmarshal(b, al)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		a.log.Warn("the address that a pod had cannot be read", "uid", uid, "err", err)
		return nil
	}
	return al
}

func (a *Agent) forgetAddress(uid string) error {
	if a.c.AddressDir == "" || !workload.IsUID(uid) {
		return nil
	}
	if err := os.Remove(a.addressFile(uid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("forget the address of pod %s: %w", uid, err)
	}
	return nil
}

// keepAddresses takes the addresses of pods that run and that the database
// does not know, before any pod is given one.
func (a *Agent) keepAddresses(ctx context.Context, known map[string]*store.Pod) {
	for uid := range a.found {
		if known[uid] != nil {
			continue
		}
		al := a.addressOf(uid)
		if al == nil {
			continue
		}
		a.log.Warn("a pod runs that the node's database does not know: it keeps its address", "uid", uid, "address", al.IP)
		if err := a.takeAgain(ctx, &store.Pod{UID: uid, Allocation: al}); err != nil {
			a.log.Warn("a pod's address cannot be taken again", "uid", uid, "err", err)
		}
	}
}
