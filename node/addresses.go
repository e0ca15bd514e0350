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

// noteAddress notes a pod's allocation. That it cannot, on a full disk without a
// tmpfs, costs no pod its start: the database has it as well.
func (a *Agent) noteAddress(uid string, al network.Allocation) {
	if a.c.AddressDir == "" || !workload.IsUID(uid) {
		return
	}
	b, err := cbor.Marshal(al)
	if err == nil {
		err = os.MkdirAll(a.c.AddressDir, 0o700)
	}
	if err == nil {
		err = atomicfile.Write(a.addressFile(uid), b, 0o600)
	}
	if err != nil {
		a.log.Warn("a pod's address is in the node's database alone", "uid", uid, "err", err)
	}
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

// releaseAddresses gives back what pods have that are not here any more: those
// that kept an address (keepAddresses) and turned out to be no pods of this
// node, and what an agent that was killed had not forgotten yet.
func (a *Agent) releaseAddresses(ctx context.Context, keep map[string]bool) {
	if a.c.AddressDir == "" {
		return
	}
	entries, err := os.ReadDir(a.c.AddressDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		a.log.Warn("addresses of pods cannot be listed", "err", err)
	}
	for _, e := range entries {
		uid := e.Name()
		if !workload.IsUID(uid) || keep[uid] || a.isKnown(uid) || ctx.Err() != nil {
			continue
		}
		if err := errors.Join(a.c.Network.Teardown(ctx, uid), a.forgetAddress(uid)); err != nil {
			a.log.Warn("the address of a pod that is gone cannot be given back", "uid", uid, "err", err)
		}
	}
}
