package wasm

import (
	"os"
	"path/filepath"
	"time"
)

// sweepOld removes small temporary files whose makers take no lock.
func sweepOld(dir, pattern string) {
	left, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil {
		return
	}
	for _, path := range left {
		if st, err := os.Lstat(path); err == nil && time.Since(st.ModTime()) > time.Hour {
			_ = os.Remove(path)
		}
	}
}
