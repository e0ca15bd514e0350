// Package architecture tests the shape of the tree itself.
package architecture

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const module = "github.com/dunlin-project/dunlin/"

// layers maps a top folder to those it may import (besides itself).
var layers = map[string][]string{
	"cmd":          {"cli", "node", "runtime", "internal"},
	"cli":          {"controlplane", "node", "runtime", "gossip", "pki", "manifests", "wire", "internal"},
	"controlplane": {"gossip", "pki", "manifests", "wire", "internal"},
	"node":         {"gossip", "runtime", "pki", "manifests", "wire", "internal"},
	"runtime":      {"internal"},
	"gossip":       {"pki", "wire", "internal"},
	"pki":          {"internal"},
	"manifests":    {"internal"},
	"wire":         {"internal"},
	"internal":     {},
}

type pkg struct {
	ImportPath string
	Imports    []string
	Name       string
}

func packages(t *testing.T) []pkg {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Imports,Name", "./...")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var list []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return list
		} else if err != nil {
			t.Fatal(err)
		}
		list = append(list, p)
	}
}

func top(path string) string {
	s, ok := strings.CutPrefix(path, module)
	if !ok {
		return ""
	}
	s, _, _ = strings.Cut(s, "/")
	return s
}

func TestImportsPointOneWay(t *testing.T) {
	seen := 0
	for _, p := range packages(t) {
		allowed, ok := layers[top(p.ImportPath)]
		if !ok {
			continue // examples, test, bench, tools: nothing imports them
		}
		seen++
		for _, i := range p.Imports {
			to := top(i)
			if to == "" || to == top(p.ImportPath) {
				continue
			}
			good := false
			for _, a := range allowed {
				good = good || a == to
			}
			if !good {
				t.Errorf("%s must not import %s", p.ImportPath, i)
			}
		}
	}
	if seen < 20 {
		t.Fatalf("only %d packages looked at: the test looks in the wrong place", seen)
	}
}

// The programs that every node runs beside the agent are small: they are fed
// with what package wire says, and know no Kubernetes types.
func TestSmallProgramsKnowNoKubernetes(t *testing.T) {
	for _, name := range []string{"dunlin-proxy", "dunlin-ingress", "dunlin-wasm"} {
		cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", "./cmd/"+name)
		cmd.Dir = filepath.Join("..", "..")
		out, err := cmd.Output()
		if err != nil || len(out) == 0 {
			t.Fatalf("go list: %v", err)
		}
		for p := range strings.Lines(string(out)) {
			if strings.HasPrefix(p, "k8s.io/api") {
				t.Errorf("%s is made of %s", name, strings.TrimSpace(p))
				break
			}
		}
	}
}

func TestNoPackageShadowsOrSaysNothing(t *testing.T) {
	for _, p := range packages(t) {
		switch p.Name {
		case "runtime", "util", "utils", "common", "helpers", "helper", "manager":
			t.Errorf("%s: a package may not be called %s", p.ImportPath, p.Name)
		}
	}
}

// TestTestsSleepOnlyInVirtualTime: time.Sleep stands in a test only inside a
// synctest bubble, so only in files that make one.
func TestTestsSleepOnlyInVirtualTime(t *testing.T) {
	looked := 0
	err := filepath.WalkDir("../..", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(p, "_test.go") {
			return err
		}
		b, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		looked++
		sleeps := bytes.Contains(b, []byte("\ttime.Sleep("))
		if sleeps && !bytes.Contains(b, []byte(`"testing/synctest"`)) {
			t.Errorf("%s sleeps outside a synctest bubble: wait for the condition instead", p)
		}
		return nil
	})
	if err != nil || looked < 50 {
		t.Fatalf("%d files looked at: %v", looked, err)
	}
}
