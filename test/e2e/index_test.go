//go:build e2e

package e2e

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
	Variant      string `json:"variant,omitempty"`
}

// index pushes an index of images, each with a program built for its platform
// that prints it.
func (h *hub) index(repo, tag string, platforms ...platform) {
	h.t.Helper()
	type entry struct {
		descriptor
		Platform platform `json:"platform"`
	}
	const kind, list = "application/vnd.oci.image.manifest.v1+json", "application/vnd.oci.image.index.v1+json"
	var entries []entry
	for _, p := range platforms {
		layer := h.layer(h.program(p))
		config, err := json.Marshal(map[string]any{"architecture": p.Architecture, "os": p.OS, "variant": p.Variant,
			"config": map[string]any{"Entrypoint": []string{"/program"}}, "rootfs": map[string]any{"type": "layers", "diff_ids": []string{sum(layer)}}})
		if err != nil {
			h.t.Fatal(err)
		}
		manifest, err := json.Marshal(map[string]any{"schemaVersion": 2, "mediaType": kind, "config": h.blob(repo, "application/vnd.oci.image.config.v1+json", config),
			"layers": []descriptor{h.blob(repo, "application/vnd.oci.image.layer.v1.tar", layer)}})
		if err != nil {
			h.t.Fatal(err)
		}
		h.do(http.MethodPut, "http://"+h.host+"/v2/"+repo+"/manifests/"+sum(manifest), kind, manifest)
		entries = append(entries, entry{descriptor{MediaType: kind, Digest: sum(manifest), Size: len(manifest)}, p})
	}
	b, err := json.Marshal(map[string]any{"schemaVersion": 2, "mediaType": list, "manifests": entries})
	if err != nil {
		h.t.Fatal(err)
	}
	h.do(http.MethodPut, "http://"+h.host+"/v2/"+repo+"/manifests/"+tag, list, b)
}

// program for a platform.
func (h *hub) program(p platform) []byte {
	h.t.Helper()
	dir := h.t.TempDir()
	main := "package main\n\nfunc main() { print(\"a program for " + p.Architecture + "\\n\") }\n"
	if err := os.WriteFile(filepath.Join(dir, "main.go"), []byte(main), 0o600); err != nil {
		h.t.Fatal(err)
	}
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", "program", "main.go")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+p.OS, "GOARCH="+p.Architecture, "GOARM="+strings.TrimPrefix(p.Variant, "v"))
	if p.Variant == "" {
		cmd.Env = append(cmd.Env, "GOARM=")
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		h.t.Fatalf("%v: %s", err, out)
	}
	b, err := os.ReadFile(filepath.Join(dir, "program"))
	if err != nil {
		h.t.Fatal(err)
	}
	return b
}

func (h *hub) layer(program []byte) []byte {
	h.t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: "program", Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(program))}); err != nil {
		h.t.Fatal(err)
	}
	if _, err := w.Write(program); err != nil {
		h.t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		h.t.Fatal(err)
	}
	return b.Bytes()
}

// TestImageForThreeProcessors: of an index the node takes the image for its
// own, and of one without it none: the pod says what there is.
func TestImageForThreeProcessors(t *testing.T) {
	cluster.NeedContainers(t)
	h := newHub(t)
	all := []platform{{"arm", "linux", "v7"}, {"arm64", "linux", ""}, {"amd64", "linux", ""}}
	h.index("team/any", "1", all...)
	var others []platform
	for _, p := range all {
		if p.Architecture != runtime.GOARCH {
			others = append(others, p)
		}
	}
	h.index("team/foreign", "1", others...)
	c := cluster.New(t)
	for _, name := range []string{"any", "foreign"} {
		c.Apply(fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: %s}\nspec: {restartPolicy: Never, containers: [{name: c, image: %q}]}\n", name, h.host+"/team/"+name+":1"))
	}
	c.Eventually(90*time.Second, "the node's own ran", func() error {
		out, err := c.Try("logs", "any")
		if err != nil || out != "a program for "+runtime.GOARCH+"\n" {
			return fmt.Errorf("%q, %v", out, err)
		}
		return nil
	})
	c.Eventually(90*time.Second, "the other says what there is", func() error {
		out, err := c.Try("get", "pod", "foreign", "-o", "json")
		for _, p := range others {
			if err == nil && !strings.Contains(out, p.OS+"/"+p.Architecture) {
				return fmt.Errorf("no word of %s", p.Architecture)
			}
		}
		if err != nil || strings.Contains(out, `"terminated"`) || !strings.Contains(out, "linux/"+runtime.GOARCH) {
			return fmt.Errorf("%s, %v", out, err)
		}
		return nil
	})
}
