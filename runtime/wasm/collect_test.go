package wasm

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// TestCollectModules: what was imported by hand, what a spec names and what
// runs stay; a module that comes from a file is taken, and comes from it again.
func TestCollectModules(t *testing.T) {
	b := newBench(t)
	if _, err := b.ImportFile(t.Context(), "hand.wasm", "testdata/print.wasm", nil); err != nil {
		t.Fatal(err)
	}
	files := map[string]string{} // image by module
	digests := map[string]string{}
	for _, m := range []string{"fail", "sleep", "loop"} {
		path := filepath.Join(t.TempDir(), m+".wasm")
		copyFile(t, "testdata/"+m+".wasm", path)
		files[m] = "file://" + path
		st, err := b.Prepare(t.Context(), workload.ImageRequest{Image: files[m], Policy: "IfNotPresent"}, nil)
		if err != nil {
			t.Fatal(err)
		}
		digests[m] = st.Digest
	}
	s := b.Store()
	// A module without a name is nobody's only after a while.
	if freed, err := s.Collect(t.Context(), []string{files["fail"], files["sleep"], files["loop"]}); err != nil || freed != 0 {
		t.Errorf("all in use: %d bytes, %v", freed, err)
	}
	s.clock = clock.Func(func() time.Time { return time.Now().Add(2 * settleTime) })
	freed, err := s.Collect(t.Context(), []string{files["fail"], digests["sleep"]})
	if err != nil || freed == 0 {
		t.Errorf("%d bytes, %v", freed, err)
	}
	for image, want := range map[string]bool{"hand.wasm": true, files["fail"]: true, digests["sleep"]: true, digests["loop"]: false} {
		digest := image
		if r, ok := s.readName(image); ok {
			digest = r.Digest
		}
		if _, err := os.Stat(filepath.Join(s.blobs(), digest[len(digestPrefix):])); (err == nil) != want {
			t.Errorf("%s: %v", image, err)
		}
	}
	if st, err := b.Prepare(t.Context(), workload.ImageRequest{Image: files["loop"], Policy: "IfNotPresent"}, nil); err != nil || st.Digest != digests["loop"] {
		t.Errorf("again from its file: %+v, %v", st, err)
	}
}
