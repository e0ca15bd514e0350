package sim

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var mutantSeeds = flag.Int("mutants", 0, "plant each fault of testdata/mutants.json into the sources, build, and look for it in so many seeds; 0 plants none")

// mutant is a fault that is planted into the sources: one rule that does not
// hold any more. finds is what the simulation must say then: in one of its
// seeds, or in the single failure whose test story names.
type mutant struct {
	Name, Finds, Story string
	Edits              []struct{ File, Old, New string }
}

func mutants(t *testing.T) (list []mutant) {
	t.Helper()
	b, err := os.ReadFile("testdata/mutants.json")
	must(t, err)
	must(t, json.Unmarshal(b, &list))
	return list
}

// overlay writes the changed sources into dir, and what go build -overlay
// wants to know of them.
func (m *mutant) overlay(dir string) (string, error) {
	replace := map[string]string{}
	for _, e := range m.Edits {
		path, err := filepath.Abs(filepath.Join("..", "..", e.File))
		if err != nil {
			return "", err
		}
		from := path
		if changed, again := replace[path]; again {
			from = changed
		}
		src, err := os.ReadFile(from)
		if err != nil {
			return "", err
		}
		if n := bytes.Count(src, []byte(e.Old)); n != 1 {
			return "", fmt.Errorf("%s: %q is there %d times", e.File, e.Old, n)
		}
		to := filepath.Join(dir, strings.ReplaceAll(e.File, "/", "_"))
		if err := os.WriteFile(to, bytes.Replace(src, []byte(e.Old), []byte(e.New), 1), 0o600); err != nil {
			return "", err
		}
		replace[path] = to
	}
	b, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "overlay.json")
	return path, os.WriteFile(path, b, 0o600)
}

// The list names lines of sources that change: what it names must be there,
// once.
func TestMutantsCanBePlanted(t *testing.T) {
	for _, m := range mutants(t) {
		if _, err := m.overlay(t.TempDir()); err != nil {
			t.Errorf("%s: %v", m.Name, err)
		}
		if _, err := regexp.Compile(m.Finds); err != nil || m.Finds == "" {
			t.Errorf("%s: finds: %v", m.Name, err)
		}
	}
}

// TestMutantsAreFound shows that the simulation can fail: it finds each fault
// that is planted, and says what it breaks.
func TestMutantsAreFound(t *testing.T) {
	if *mutantSeeds == 0 {
		t.Skip("SKIPPED: every fault needs a build of its own; make sim-mutants")
	}
	for _, m := range mutants(t) {
		t.Run(m.Name, func(t *testing.T) {
			dir := t.TempDir()
			overlay, err := m.overlay(dir)
			must(t, err)
			bin := filepath.Join(dir, "sim.test")
			if out, err := exec.Command("go", "test", "-c", "-trimpath", "-overlay", overlay, "-o", bin, ".").CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			if m.Story != "" {
				m.lookInStory(t, bin)
				return
			}
			// The fault must be found; how the run ends else does not matter.
			out, err := exec.Command(bin, "-test.run", "^TestSeeds$", "-test.timeout", "0", "-seeds", fmt.Sprint(*mutantSeeds), "-again", "0").CombinedOutput()
			found := regexp.MustCompile(`(?m)^ +\S+_test\.go:\d+: (\d-\d+): .*(`+m.Finds+`).*$`).FindAllStringSubmatch(string(out), -1)
			seeds := map[string]bool{}
			for _, f := range found {
				seeds[f[1]] = true
			}
			if err == nil || len(seeds) == 0 {
				t.Fatalf("not found in %d seeds (%v): ...%s", *mutantSeeds, err, out[max(0, len(out)-2000):])
			}
			t.Logf("found by %d seeds; first: %s", len(seeds), strings.TrimSpace(found[0][0]))
		})
	}
}

// lookInStory runs the one failure that shall find the fault.
func (m *mutant) lookInStory(t *testing.T, bin string) {
	t.Helper()
	out, err := exec.Command(bin, "-test.run", "^"+m.Story+"$", "-test.timeout", "0").CombinedOutput()
	said := regexp.MustCompile(`(?m)^ +\S+_test\.go:\d+: .*(` + m.Finds + `).*$`).FindString(string(out))
	if err == nil || said == "" {
		t.Fatalf("%s does not find it (%v): ...%s", m.Story, err, out[max(0, len(out)-2000):])
	}
	t.Logf("found by %s: %s", m.Story, strings.TrimSpace(said))
}
