//go:build e2e

package e2e

import (
	"bytes"
	"encoding/base64"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// Nothing of a Secret lies on a disk in clear: not in what servers keep, not
// in what the node keeps for its next start, and not in what its pods are
// given as a variable, a file, a token or a certificate of an Ingress.
func TestSecretsAreSealedOnDisk(t *testing.T) {
	// The run-time folder is in memory, as /run is.
	memory, err := os.MkdirTemp("/dev/shm", "dne")
	if err != nil {
		t.Skip("SKIPPED: no file system in memory:", err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(memory) })
	dir := t.TempDir()
	if err := errors.Join(os.Chmod(dir, 0o711), os.Chmod(memory, 0o711), os.Symlink(memory, filepath.Join(dir, "run"))); err != nil {
		t.Fatal(err)
	}
	c := cluster.NewAt(t, dir)
	c.Import("hello.wasm", filepath.Join(cluster.Root(t), "bin", "examples", "hello.wasm"))
	const value = "correct-horse-battery-staple-7f3a91"
	cert, _ := tlsSecret(t, "cert", "a.example")
	c.Apply("apiVersion: v1\nkind: Secret\nmetadata: {name: s}\nstringData: {password: " + value + "}\n---\n" + cert + "---\n" + webIngress("web", "a.example", "cert", "") + "---\n" + helloService + "---\n" +
		strings.Replace(strings.Replace(hello("1", 1), "env: [", "volumeMounts: [{name: s, mountPath: /s}]\n        env: [{name: PASSWORD, valueFrom: {secretKeyRef: {name: s, key: password}}}, ", 1),
			"      containers:", "      volumes: [{name: s, secret: {secretName: s}}]\n      containers:", 1))
	pod := c.WaitReady("app=hello", 1)[0]
	// The pod has it.
	file := filepath.Join("volumes", string(pod.UID))
	found := false
	_ = filepath.WalkDir(filepath.Join(memory, file), func(p string, d fs.DirEntry, err error) error {
		if b, rerr := os.ReadFile(p); err == nil && rerr == nil && string(b) == value {
			found = true
		}
		return nil
	})
	if !found {
		t.Error("the pod has no file with the Secret in memory: nothing would be shown")
	}
	_, key, _ := strings.Cut(cert, "tls.key: ")
	pem, err := base64.StdEncoding.DecodeString(strings.TrimRight(strings.Fields(key)[0], "}"))
	if err != nil {
		t.Fatal(err)
	}
	wanted := map[string][]byte{"a Secret": []byte(value), "a Secret in base64": []byte(base64.StdEncoding.EncodeToString([]byte(value))), "a certificate's key": bytes.Split(pem, []byte("\n"))[1]}
	if token := tokenOf(memory); token != "" {
		wanted["a token"] = []byte(token)
	}
	look := func(when string) {
		t.Helper()
		for _, dir := range []string{"state", "config"} {
			if err := filepath.WalkDir(filepath.Join(c.Dir, dir), func(p string, d fs.DirEntry, err error) error {
				if err != nil || !d.Type().IsRegular() {
					if errors.Is(err, fs.ErrNotExist) {
						return nil // it was replaced meanwhile
					}
					return err
				}
				b, err := os.ReadFile(p)
				if errors.Is(err, fs.ErrNotExist) {
					return nil
				}
				for what, text := range wanted {
					if bytes.Contains(b, text) {
						t.Errorf("%s: %s is in %s", when, what, p)
					}
				}
				return err
			}); err != nil {
				t.Fatal(err)
			}
		}
	}
	look("while it runs")
	// It opens again without a server being asked: the pod is adopted, and what
	// it is told by the next start is the same.
	c.Kill()
	look("after kill -9")
	c.Start()
	c.Eventually(time.Minute, "the node is Ready", func() error { return c.NodeReady("e2e") })
	c.WaitReady("app=hello", 1)
	look("after the next start")
}

// tokenOf is a token that a pod of the node was given, without the part that
// all tokens begin with.
func tokenOf(dir string) (token string) {
	_ = filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.Name() == "token" {
			if b, err := os.ReadFile(p); err == nil && bytes.Count(b, []byte(".")) == 2 {
				token = string(b[bytes.LastIndexByte(b, '.'):])
			}
		}
		return nil
	})
	return token
}
