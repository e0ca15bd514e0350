package cluster

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/dunlin-project/dunlin/runtime/images"
)

// NeedContainers skips where OCI containers cannot run.
func NeedContainers(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: OCI containers need root")
	}
	for _, p := range []string{"runc", "conmon", "busybox"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("SKIPPED: %s is not installed (test/setup.sh does)", p)
		}
	}
}

// ImportBusybox gives the node an image of the machine's static busybox, with
// further files by their path.
func (c *Cluster) ImportBusybox(name string, files map[string]string) {
	c.t.Helper()
	importBusybox(c.t, c.Dir, name, files)
}

// ImportBusybox is the same for the node of an agent.
func (a *Agent) ImportBusybox(name string, files map[string]string) {
	a.t.Helper()
	importBusybox(a.t, a.Dir, name, files)
}

func importBusybox(t testing.TB, dir, name string, files map[string]string) {
	t.Helper()
	s, err := images.Open(images.Config{Dir: filepath.Join(dir, "state", "images")})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Import(t.Context(), name, bytes.NewReader(Busybox(t, name, files)), nil); err != nil {
		t.Fatal(err)
	}
}

// Busybox is a docker-archive of an image with the machine's static busybox.
func Busybox(t testing.TB, name string, files map[string]string) []byte {
	t.Helper()
	bin, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(bin)
	if err != nil {
		t.Fatal(err)
	}
	list, err := exec.Command(bin, "--list").Output()
	if err != nil {
		t.Fatal(err)
	}
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	put := func(h tar.Header, body []byte) {
		h.Size = int64(len(body))
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(body); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{"bin/", "etc/", "tmp/", "root/"} {
		put(tar.Header{Name: d, Typeflag: tar.TypeDir, Mode: 0o755}, nil)
	}
	put(tar.Header{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755}, program)
	for _, n := range strings.Fields(string(list)) {
		if n != "busybox" {
			put(tar.Header{Name: "bin/" + n, Typeflag: tar.TypeSymlink, Linkname: "busybox"}, nil)
		}
	}
	put(tar.Header{Name: "etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644}, []byte("root:x:0:0:root:/root:/bin/sh\n"))
	for p, text := range files {
		put(tar.Header{Name: strings.TrimPrefix(p, "/"), Typeflag: tar.TypeReg, Mode: 0o755}, []byte(text))
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{"Cmd": []string{"sh"}, "Env": []string{"PATH=/bin"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer.Bytes()))}},
	})
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := json.Marshal([]map[string]any{{"Config": "config.json", "RepoTags": []string{name}, "Layers": []string{"layer.tar"}}})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	w = tar.NewWriter(&out)
	for _, f := range []struct {
		name string
		body []byte
	}{{"layer.tar", layer.Bytes()}, {"config.json", config}, {"manifest.json", manifest}} {
		put(tar.Header{Name: f.name, Typeflag: tar.TypeReg, Mode: 0o644}, f.body)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}
