//go:build e2e

package e2e

import (
	"archive/tar"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
	"github.com/dunlin-project/dunlin/test/unused"
)

// hub is Debian's docker-registry on a port of its own.
type hub struct {
	t    *testing.T
	host string
}

func newHub(t *testing.T) *hub {
	t.Helper()
	if _, err := exec.LookPath("docker-registry"); err != nil {
		t.Skip("SKIPPED: docker-registry is not installed (test/setup.sh does)")
	}
	h := &hub{t: t, host: unused.Port(t).String()}
	dir := t.TempDir()
	conf := filepath.Join(dir, "config.yml")
	if err := os.WriteFile(conf, []byte(fmt.Sprintf("version: 0.1\nstorage: {filesystem: {rootdirectory: %s}}\nhttp: {addr: %s}\n", dir, h.host)), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("docker-registry", "serve", conf)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	patiently(t, "the registry answers", func() error { _, err := get("http://" + h.host + "/v2/"); return err })
	return h
}

func (h *hub) do(method, u, kind string, body []byte) *http.Response {
	h.t.Helper()
	r, err := http.NewRequest(method, u, bytes.NewReader(body))
	if err != nil {
		h.t.Fatal(err)
	}
	r.Header.Set("Content-Type", kind)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		h.t.Fatal(err)
	}
	b, _ := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		h.t.Fatalf("%s %s: %s %s", method, u, resp.Status, b)
	}
	return resp
}

func sum(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

func (h *hub) blob(repo, kind string, b []byte) descriptor {
	h.t.Helper()
	at := h.do(http.MethodPost, "http://"+h.host+"/v2/"+repo+"/blobs/uploads/", "", nil).Header.Get("Location")
	sep := "?"
	if strings.Contains(at, "?") {
		sep = "&"
	}
	h.do(http.MethodPut, at+sep+"digest="+sum(b), "application/octet-stream", b)
	return descriptor{MediaType: kind, Digest: sum(b), Size: len(b)}
}

// push puts a manifest there and returns its digest.
func (h *hub) push(repo, tag string, config []byte, layers ...descriptor) string {
	h.t.Helper()
	const kind = "application/vnd.oci.image.manifest.v1+json"
	b, err := json.Marshal(map[string]any{"schemaVersion": 2, "mediaType": kind, "config": h.blob(repo, "application/vnd.oci.image.config.v1+json", config), "layers": layers})
	if err != nil {
		h.t.Fatal(err)
	}
	h.do(http.MethodPut, "http://"+h.host+"/v2/"+repo+"/manifests/"+tag, kind, b)
	return sum(b)
}

// busybox pushes an image of the machine's busybox.
func (h *hub) busybox(repo, tag string) string {
	h.t.Helper()
	parts := map[string][]byte{}
	r := tar.NewReader(bytes.NewReader(cluster.Busybox(h.t, "x", nil)))
	for {
		e, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			parts[e.Name], err = io.ReadAll(r)
		}
		if err != nil {
			h.t.Fatal(err)
		}
	}
	return h.push(repo, tag, parts["config.json"], h.blob(repo, "application/vnd.oci.image.layer.v1.tar", parts["layer.tar"]))
}

// sign does what `cosign sign --key` does.
func (h *hub) sign(repo, digest string, key *ecdsa.PrivateKey) {
	h.t.Helper()
	payload := []byte(`{"critical":{"identity":{"docker-reference":"` + h.host + "/" + repo + `"},"image":{"docker-manifest-digest":"` + digest + `"},"type":"cosign container image signature"},"optional":null}`)
	s := sha256.Sum256(payload)
	sig, err := ecdsa.SignASN1(rand.Reader, key, s[:])
	if err != nil {
		h.t.Fatal(err)
	}
	l := h.blob(repo, "application/vnd.dev.cosign.simplesigning.v1+json", payload)
	l.Annotations = map[string]string{"dev.cosignproject.cosign/signature": base64.StdEncoding.EncodeToString(sig)}
	h.push(repo, strings.Replace(digest, ":", "-", 1)+".sig", []byte(`{}`), l)
}

func signingKey(t *testing.T) (*ecdsa.PrivateKey, string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKIXPublicKey(k.Public())
	if err != nil {
		t.Fatal(err)
	}
	return k, string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
}

const pulled = `apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: %[1]s}
spec:
  replicas: 1
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - name: main
        image: "%[2]s"
        command: [sh, -c, "test -x /all/bin/busybox -a -e /part/passwd && ! touch /all/x && exec sleep 1000"]
        volumeMounts: [{name: image, mountPath: /all}, {name: image, mountPath: /part, subPath: etc}]
      volumes: [{name: image, image: {reference: "%[2]s"}}]
`

func policy(namespace, pattern, key string) string {
	p := fmt.Sprintf("rules:\n- images: [%q]\n  keys: |\n    %s\n", pattern, strings.ReplaceAll(strings.TrimSpace(key), "\n", "\n    "))
	b, _ := json.Marshal(p)
	return fmt.Sprintf("apiVersion: v1\nkind: Namespace\nmetadata: {name: %s, annotations: {dunlin.dev/image-policy: %s}}\n", namespace, b)
}

func states(pods []corev1.Pod) (out []string) {
	for i := range pods {
		for _, s := range pods[i].Status.ContainerStatuses {
			out = append(out, fmt.Sprintf("%s: %+v", pods[i].Name, s.State))
		}
	}
	return out
}

func podsIn(c *cluster.Cluster, namespace string) ([]corev1.Pod, error) {
	var l corev1.PodList
	out, err := c.Try("get", "pods", "-n", namespace, "-o", "json")
	if err == nil {
		err = json.Unmarshal([]byte(out), &l)
	}
	return l.Items, err
}

// TestRegistry: a Deployment is pulled from a real registry, and mounts an
// image; in a namespace
// with an image policy only what its key signed is, and what is here already
// stops to start when the policy no longer lets it.
func TestRegistry(t *testing.T) {
	cluster.NeedContainers(t)
	h := newHub(t)
	image := h.host + "/team/web:1"
	digest := h.busybox("team/web", "1")
	key, pub := signingKey(t)
	_, other := signingKey(t)
	c := cluster.New(t)
	c.Apply(policy("strict", h.host+"/team/*", pub) + "---\n" + fmt.Sprintf(pulled, "strict", image))
	waits := func(want ...string) {
		t.Helper()
		c.Eventually(60*time.Second, "the pod waits for a signature", func() error {
			pods, err := podsIn(c, "strict")
			for _, p := range pods {
				for _, s := range p.Status.ContainerStatuses {
					if w := s.State.Waiting; w != nil {
						text := w.Reason + ": " + w.Message
						for _, x := range want {
							if !strings.Contains(text, x) {
								return errors.New(text)
							}
						}
						return nil
					}
				}
			}
			return fmt.Errorf("%d pods, none waits, %v", len(pods), err)
		})
	}
	waits("image policy of namespace strict", "it has no signature", "cosign sign")
	c.Apply(fmt.Sprintf(pulled, "default", image))
	runs := func(namespace string) {
		t.Helper()
		c.Eventually(90*time.Second, "it runs in "+namespace, func() error {
			pods, err := podsIn(c, namespace)
			for i := range pods {
				if cluster.Ready(&pods[i]) && strings.HasSuffix(pods[i].Status.ContainerStatuses[0].ImageID, digest) {
					return nil
				}
			}
			return fmt.Errorf("%s, %v", states(pods), err)
		})
	}
	runs("default")
	h.sign("team/web", digest, key)
	c.Run("delete", "pod", "-n", "strict", "-l", "app=web") // a new pod tries at once
	runs("strict")
	c.Apply(policy("strict", h.host+"/team/*", other))
	c.Run("delete", "pod", "-n", "strict", "-l", "app=web")
	waits("none of its 1 signatures is by a key of the policy")
	if out, err := c.TryIn(policy("bad", "x", "no key"), "apply", "-f", "-"); err == nil || !strings.Contains(out+err.Error(), "PEM blocks") {
		t.Errorf("a policy that cannot be read: %s, %v", out, err)
	}
}
