package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/dunlin-project/dunlin/internal/claim"
)

// netnsClaims holds a file for each network namespace with an agent. It is
// one place for the whole machine, whatever --run-dir says.
const netnsClaims = "/run/dunlin/netns"

// machineClaims are what an agent holds of its machine.
type machineClaims struct{ run, netns *claim.Claim }

// claims take what no two agents may share, before anything in it is
// touched: what one finds there and does not know it would stop as left over.
func (o *nodeOptions) claims() (*machineClaims, error) {
	me := claim.Holder{StateDir: o.state, RunDir: o.run}
	run, err := claim.Take(filepath.Join(o.run, "lock"), me)
	if err != nil {
		return nil, heldHint(err, "run folder "+o.run, "give this one its own --run-dir, --state-dir and --netns")
	}
	if os.Geteuid() != 0 {
		return &machineClaims{run: run}, nil // makes no network namespace
	}
	ns, err := claim.Take(filepath.Join(netnsClaims, o.netns+".lock"), me)
	if err != nil {
		run.Release()
		return nil, heldHint(err, "network namespace "+o.netns, "give this one its own --netns")
	}
	return &machineClaims{run, ns}, nil
}

func (c *machineClaims) release() {
	c.netns.Release()
	c.run.Release()
	if c.netns == nil {
		return
	}
	// Only when nothing of another agent is in there.
	_ = os.Remove(netnsClaims)
	_ = os.Remove(filepath.Dir(netnsClaims))
}

// renew takes again what lost its file: who removes a run folder (by default
// that of all network namespaces' claims, too) would let a second agent in.
func (c *machineClaims) renew() (again bool, err error) {
	for _, one := range []*claim.Claim{c.run, c.netns} {
		if one == nil {
			continue
		}
		made, oneErr := one.Renew()
		again, err = again || made, errors.Join(err, oneErr)
	}
	return again, err
}

// othersRun says whether another agent runs as root in the network that this
// process is in.
func (o *nodeOptions) othersRun() bool {
	locks, _ := filepath.Glob(filepath.Join(netnsClaims, "*.lock"))
	here, herr := os.Readlink("/proc/self/ns/net")
	return slices.ContainsFunc(locks, func(l string) bool {
		by, held := claim.By(l)
		if !held || l == filepath.Join(netnsClaims, o.netns+".lock") {
			return false
		}
		there, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", by.PID))
		return err != nil || herr != nil || there == here // not known: perhaps
	})
}

func heldHint(err error, what, instead string) error {
	if errors.Is(err, claim.ErrHeld) {
		return fmt.Errorf("%s: %w; stop that one first, or %s", what, err, instead)
	}
	if errors.Is(err, fs.ErrPermission) && os.Geteuid() != 0 {
		return fmt.Errorf("%s: %w; it is another user's: become that user, or root (sudo)", what, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}
