package wasm

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

var _ workload.ImageCounter = (*Runtime)(nil)

// Images implements workload.ImageCounter. It reads folders, not files.
func (r *Runtime) Images() (workload.ImageUsage, error) {
	var u workload.ImageUsage
	entries, err := os.ReadDir(r.store.blobs())
	if err != nil {
		return u, fmt.Errorf("module store: %w", err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || strings.HasPrefix(e.Name(), ".") {
			continue // removed meanwhile; an import under way
		}
		u.Images++
		u.Bytes += info.Size()
	}
	u.CompiledBytes, err = r.cache.bytes()
	return u, err
}

// bytes are those of all files of the cache.
func (c *cache) bytes() (total int64, err error) {
	err = filepath.WalkDir(c.dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil //nolint:nilerr // an entry may be evicted meanwhile
		}
		if info, err := d.Info(); err == nil {
			total += info.Size()
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("compile cache: %w", err)
	}
	return total, nil
}
