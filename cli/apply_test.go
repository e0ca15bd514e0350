package cli

import (
	"strings"
	"testing"
)

// TestApplyNamesEveryFault: whatever cannot be read, of all files, is told with
// its line and path, and nothing is applied.
func TestApplyNamesEveryFault(t *testing.T) {
	w := newWorld(t)
	a := w.file("a.yaml", cm("one", "app: x", "1")+"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: two}\ndat: {a: b}\n---\n"+
		"apiVersion: v1\nkind: Pod\nmetadata: {name: three}\nspec:\n  containers:\n  - {name: c, imag: x}\n")
	b := w.file("b.yaml", "apiVersion: v1\nkind: Nonsense\nmetadata: {name: x}\n")
	code, out, errs := run("apply", "-f", a, "-f", b, "-f", w.file("c.yaml", cm("four", "app: x", "1")), "-f", a+".none")
	if code != 1 || out != "" {
		t.Errorf("exit %d\n%s", code, out)
	}
	for _, want := range []string{"a.yaml:9:1: dat: ", "a.yaml:16:15: spec.containers[0].imag: ", "b.yaml:2:7: kind: ", "a.yaml.none: no such file", "(nothing was changed: 3 files cannot be used)"} {
		if !strings.Contains(errs, want) {
			t.Errorf("no %q in\n%s", want, errs)
		}
	}
	if out := w.ok("get", "cm", "-o", "name"); strings.Contains(out, "one") || strings.Contains(out, "four") {
		t.Errorf("%s", out)
	}
}

// TestApplyTellsTheLineOfAField: what the server refuses stands at the field's
// line, not only the object's.
func TestApplyTellsTheLineOfAField(t *testing.T) {
	w := newWorld(t)
	deploy := `apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: -1
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
      - name: c
        image: file:///a.wasm
      restartPolicy: Never
`
	for name, before := range map[string]string{"alone": "", "one of two": cm("one", "app: x", "1")} {
		code, _, errs := run("apply", "-f", w.file("m.yaml", before+deploy))
		lines := []string{"m.yaml:5: ", "(spec.template.spec.restartPolicy: ", "m.yaml:13)"}
		if before != "" {
			lines = []string{"m.yaml:10: ", "m.yaml:18)"}
		}
		if code != 1 {
			t.Errorf("%s: exit %d", name, code)
		}
		for _, want := range lines {
			if !strings.Contains(errs, want) {
				t.Errorf("%s: no %q in\n%s", name, want, errs)
			}
		}
	}
	// A merge that fails names its field in words only.
	_, _, errs := run("apply", "-f", w.file("d.yaml", strings.Replace(deploy, "      restartPolicy", "      - {name: c, image: b}\n      restartPolicy", 1)))
	if !strings.Contains(errs, "d.yaml:10: ") {
		t.Errorf("%s", errs)
	}
	// Also where the object's namespace is still to be made.
	_, _, errs = run("apply", "-f", w.file("n.yaml", "apiVersion: v1\nkind: Namespace\nmetadata: {name: newer}\n---\n"+
		strings.Replace(deploy, "{name: web}", "{name: web, namespace: newer}", 1)))
	if !strings.Contains(errs, "n.yaml:9: ") {
		t.Errorf("%s", errs)
	}
}
