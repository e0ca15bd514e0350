package cli

import (
	"log/slog"
	"path/filepath"
	"time"

	"github.com/dunlin-project/dunlin/node/board"
	"github.com/dunlin-project/dunlin/node/store"
)

// openNodeDB opens the node's database, whose Secrets are sealed with a key of
// this machine.
func openNodeDB(dir string, log *slog.Logger) (*store.Bolt, error) {
	facts := board.Serial("/")
	if facts == "" {
		log.Info("this machine has no serial number that can be read: whoever takes its disk can read the Secrets of its pods", "hint", "dunlin node revoke says which")
	}
	seal, err := store.LoadSeal(dir, facts)
	if err != nil {
		return nil, err
	}
	return store.Open(filepath.Join(dir, "node.db"), seal, 10*time.Second, log)
}
