//go:build e2e

package e2e

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// TestUnusedMethodsAreDropped: one reachable call of reflect's MethodByName
// with a name that is not constant (text/template, html/template, a library)
// and the linker keeps every exported method of every type: 6 MB here. The
// table of function names shows it: no one calls reflect.(*Value).MethodByName,
// the wrapper that exists only for looking it up by name.
func TestUnusedMethodsAreDropped(t *testing.T) {
	dunlin := cluster.Binary(t)
	for _, program := range []string{dunlin, filepath.Join(filepath.Dir(dunlin), "dunlin-wasm")} {
		b, err := os.ReadFile(program)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Contains(b, []byte("reflect.(*rtype).Kind")) {
			t.Errorf("%s: no function names here: this test looks at the wrong thing", program)
		}
		if bytes.Contains(b, []byte("reflect.(*Value).MethodByName")) {
			t.Errorf("%s: methods that nothing calls are linked: go build -ldflags=-dumpdep prints what reaches a <ReflectMethod>", program)
		}
	}
}
