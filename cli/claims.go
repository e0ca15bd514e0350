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

// claims take what no two agents may share, before anything in it is
// touched: what one finds there and does not know it would stop as left over.
func (o *nodeOptions) claims() (release func(), err error) {
	me := claim.Holder{StateDir: o.state, RunDir: o.run}
	run, err := claim.Take(filepath.Join(o.run, "lock"), me)
	if err != nil {
		return nil, heldHint(err, "run folder "+o.run, "give this one its own --run-dir, --state-dir and --netns")
	}
	if os.Geteuid() != 0 {
		return run.Release, nil // makes no network namespace
	}
	ns, err := claim.Take(filepath.Join(netnsClaims, o.netns+".lock"), me)
	if err != nil {
		run.Release()
		return nil, heldHint(err, "network namespace "+o.netns, "give this one its own --netns")
	}
	return func() {
		ns.Release()
		run.Release()
		// Only when nothing of another agent is in there.
		_ = os.Remove(netnsClaims)
		_ = os.Remove(filepath.Dir(netnsClaims))
	}, nil
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
