package controlplane

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
)

// ErrStateGone says that a server's replicated state is not where it was.
var ErrStateGone = errors.New("the replicated state that was here is gone")

// markFile, in the state folder, says that the replicated state was there.
const markFile = "has-state"

// markState remembers that the replicated state exists, for checkState.
func markState(dir string) error {
	path := filepath.Join(dir, markFile)
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	if err := atomicfile.Write(path, []byte("1"), 0o600); err != nil {
		return fmt.Errorf("mark of the state: %w", err)
	}
	return nil
}

// checkState refuses a server whose replicated state is gone, with its keys
// and ids still there: with an empty one it would tell the nodes of its cluster
// to stop everything, and a voter would vote twice. A first start that was cut
// short left no mark yet, and goes on.
func checkState(dir, raft string, joined bool) error {
	if _, err := os.Stat(filepath.Join(dir, markFile)); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("mark of the state: %w", err)
	}
	held := 0
	for _, part := range []string{"log", "log.new", "snapshots"} {
		entries, err := os.ReadDir(filepath.Join(raft, part))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("replicated state: %w", err)
		}
		held += len(entries)
	}
	if held > 0 {
		return nil // what is missing of it, opening it says
	}
	if joined {
		return fmt.Errorf("%s: %w, or its disk is not mounted; if it is lost, remove this server from the cluster, remove all of %s and join again", raft, ErrStateGone, dir)
	}
	return fmt.Errorf("%s: %w, or its disk is not mounted; if it is lost, restore a snapshot ('dunlin snapshot restore FILE --yes'), or remove all of %s to begin a new cluster", raft, ErrStateGone, dir)
}
