package cluster

import (
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
)

// number is of a cluster or node: in the names of its network namespace and
// control group, so no other on this machine may have it. Tests that run side
// by side on purpose have a slot each (DUNLIN_TEST_SLOT, 1 to 15), in which
// numbers are counted up from a random one.
var number = func() func() int {
	var mu sync.Mutex
	const size = 60_000
	next := rand.IntN(size)
	return func() int {
		slot, err := strconv.Atoi(os.Getenv("DUNLIN_TEST_SLOT"))
		if err != nil || slot < 1 || slot > 15 {
			return rand.IntN(1_000_000)
		}
		mu.Lock()
		defer mu.Unlock()
		next++
		return slot*size + next%size
	}
}()

// keepLog copies the whole log of a process of a test that failed into the
// folder DUNLIN_TEST_LOGS.
func keepLog(t testing.TB, name, path string) {
	to := os.Getenv("DUNLIN_TEST_LOGS")
	if to == "" {
		return
	}
	b, err := os.ReadFile(path)
	if err == nil {
		err = os.MkdirAll(to, 0o755)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(to, filepath.Base(filepath.Dir(path))+"-"+name+".log"), b, 0o644)
	}
	if err != nil {
		t.Logf("the log of %s is not kept: %v", name, err)
	}
}

// NextBuild is the tree built as the release after this one would be: its
// feature level is one higher (build tag dunlin_next), its version is "next".
// $DUNLIN_NEXT is one that was built before.
func NextBuild(t testing.TB) string {
	t.Helper()
	if p := os.Getenv("DUNLIN_NEXT"); p != "" {
		return p
	}
	bin := filepath.Join(t.TempDir(), "dunlin")
	cmd := exec.Command("go", "build", "-tags", "dunlin_next", "-ldflags", "-s -w -X github.com/dunlin-project/dunlin/internal/version.Version=next", "-o", bin, "./cmd/dunlin")
	cmd.Dir = Root(t)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v: %s", err, out)
	}
	return bin
}
