package static

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const good = `apiVersion: v1
kind: Pod
metadata:
  name: sensor
spec:
  containers:
  - name: main
    image: file:///srv/sensor.wasm
`

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	p := filepath.Join(dir, name)
	if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	// Two writes within one tick of the file system's clock must differ.
	stampTime = stampTime.Add(time.Second)
	if err := os.Chtimes(p, stampTime, stampTime); err != nil {
		t.Fatal(err)
	}
}

var stampTime = time.Unix(1_700_000_000, 0)

func TestPods(t *testing.T) {
	dir := t.TempDir()
	f := New(filepath.Join(dir, "none"), "n1")
	if pods, errs := f.Pods(); len(pods)+len(errs) != 0 {
		t.Fatalf("missing folder: %v %v", pods, errs)
	}
	f = New(dir, "n1")
	write(t, dir, "a.yaml", good)
	write(t, dir, ".b.yaml.swp", "x")
	write(t, dir, "README", "x")
	pods, errs := f.Pods()
	if len(errs) != 0 || len(pods) != 1 {
		t.Fatalf("%v %v", pods, errs)
	}
	p := pods[0]
	if p.Name != "sensor-n1" || p.Namespace != "default" || *p.Spec.RuntimeClassName != "wasm" || p.Spec.NodeName != "n1" ||
		p.Annotations[sourceAnnotation] != "file" || p.Spec.RestartPolicy != "Always" || len(p.UID) != 36 {
		t.Fatalf("%+v", p)
	}
	// The same file is the same pod for another agent; an edit is a new one.
	again, _ := New(dir, "n1").Pods()
	if again[0].UID != p.UID {
		t.Fatal("uid is not stable")
	}
	write(t, dir, "a.yaml", strings.Replace(good, "sensor.wasm", "sensor2.wasm", 1))
	pods, _ = f.Pods()
	if len(pods) != 1 || pods[0].UID == p.UID {
		t.Fatal("an edited file is not a new pod")
	}
	// A faulty edit keeps the last good pod and says where the fault is.
	was := pods[0].UID
	write(t, dir, "a.yaml", strings.Replace(good, "image:", "imagee:", 1))
	pods, errs = f.Pods()
	if len(pods) != 1 || pods[0].UID != was || len(errs) != 1 || !strings.Contains(errs[0].Error(), "a.yaml:8") {
		t.Fatalf("%v %v", pods, errs)
	}
	write(t, dir, "b.yaml", good)
	write(t, dir, "c.yaml", good)
	if pods, errs = f.Pods(); len(pods) != 1 || len(errs) != 3 {
		t.Fatalf("double name: %d pods, %v", len(pods), errs)
	}
	for _, n := range []string{"a.yaml", "b.yaml", "c.yaml"} {
		_ = os.Remove(filepath.Join(dir, n))
	}
	if pods, errs = f.Pods(); len(pods)+len(errs) != 0 {
		t.Fatalf("removed files: %v %v", pods, errs)
	}
}

func TestFaults(t *testing.T) {
	for name, text := range map[string]string{
		"holds Pods only":      "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n",
		"metadata.name":        strings.Replace(good, "  name: sensor\n", "  labels: {a: b}\n", 1),
		"a Secret":             good + "  volumes:\n  - name: s\n    secret: {secretName: x}\n",
		"other objects":        good + "    envFrom:\n    - configMapRef: {name: x}\n",
		"a ServiceAccount":     good + "  serviceAccountName: x\n",
		"spec.containers[0].n": strings.Replace(good, "name: main", "name: Main_X", 1),
	} {
		dir := t.TempDir()
		write(t, dir, "a.yaml", text)
		pods, errs := New(dir, "n1").Pods()
		if len(pods) != 0 || len(errs) != 1 || !strings.Contains(errs[0].Error(), name) {
			t.Errorf("%s: %v %v", name, pods, errs)
		}
	}
}
