//go:build e2e

package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

const web = `apiVersion: v1
kind: ConfigMap
metadata: {name: page}
data: {index.html: "hello from a container\n"}
---
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web}}
spec:
  initContainers:
  - {name: prepare, image: busybox:test, imagePullPolicy: Never, command: [sh, -c, "echo prepared > /shared/state"], volumeMounts: [{name: shared, mountPath: /shared}]}
  containers:
  - name: web
    image: busybox:test
    imagePullPolicy: Never
    command: [sh, -c, "echo serving; cat /etc/hosts /etc/hostname /etc/resolv.conf; exec httpd -f -p 80 -h /www"]
    env: [{name: COLOUR, value: blue}]
    ports: [{containerPort: 80, hostPort: %d}]
    readinessProbe: {httpGet: {path: /, port: 80}, periodSeconds: 1}
    livenessProbe: {exec: {command: [sh, -c, "test $COLOUR = blue && test -e /shared/state"]}, periodSeconds: 1}
    resources: {limits: {memory: 32Mi, cpu: 500m}}
    securityContext: {readOnlyRootFilesystem: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL], add: [NET_BIND_SERVICE]}}
    volumeMounts: [{name: page, mountPath: /www}, {name: shared, mountPath: /shared}]
  - name: side
    image: busybox:test
    imagePullPolicy: Never
    command: [sh, -c, "echo x > /page/index.html; until wget -qO- http://127.0.0.1/; do sleep 0.1; done; while :; do sleep 1; done"]
    volumeMounts: [{name: page, mountPath: /page}]
  hostAliases: [{ip: 192.0.2.7, hostnames: [far.example]}]
  terminationGracePeriodSeconds: 1
  volumes: [{name: page, configMap: {name: page}}, {name: shared, emptyDir: {}}]
`

// TestContainers: a pod of containers with all that pods usually have, beside
// a Wasm pod that it calls, through a killed agent.
func TestContainers(t *testing.T) {
	cluster.NeedContainers(t)
	c := cluster.New(t)
	c.ImportBusybox("busybox:test", nil)
	var n corev1.Node
	if err := c.Get("node/e2e", &n); err != nil {
		t.Fatal(err)
	}
	if n.Labels["dunlin.dev/runtime.runc"] != "true" {
		t.Errorf("labels %v", n.Labels)
	}
	for _, cond := range n.Status.Conditions {
		if cond.Type == "dunlin.dev/RunsContainers" && cond.Status != corev1.ConditionTrue {
			t.Errorf("condition %+v", cond)
		}
	}
	hostPort := 31000 + time.Now().Nanosecond()%1000
	c.Apply(fmt.Sprintf(web, hostPort))
	pod := c.WaitReady("app=web", 1)[0]
	if pod.Spec.RuntimeClassName == nil || *pod.Spec.RuntimeClassName != "oci" || !strings.HasPrefix(pod.Status.ContainerStatuses[0].ContainerID, "runc://") {
		t.Errorf("class %v, %+v", pod.Spec.RuntimeClassName, pod.Status.ContainerStatuses)
	}
	c.Eventually(30*time.Second, "the sidecar reached the server over its own loopback", func() error {
		if out, err := c.Try("logs", "web", "-c", "side"); err != nil || !strings.HasSuffix(out, "hello from a container\n") {
			return fmt.Errorf("%q, %v", out, err)
		}
		return nil
	})
	if out := c.Run("logs", "web", "-c", "side"); !strings.Contains(out, "Read-only file system") {
		t.Errorf("the files of a ConfigMap can be written: %s", out)
	}
	log := c.Run("logs", "web", "-c", "web")
	for _, want := range []string{"serving\n", pod.Status.PodIP + "\tweb\n", "192.0.2.7\tfar.example\n", "\nweb\n"} {
		if !strings.Contains(log, want) {
			t.Errorf("%q is missing in %s", want, log)
		}
	}
	for _, address := range []string{pod.Status.PodIP + ":80", fmt.Sprintf("127.0.0.1:%d", hostPort)} {
		if got := fetch(t, address); got != "hello from a container\n" {
			t.Errorf("%s: %q", address, got)
		}
	}
	// A Wasm pod, called from a container.
	c.Import("hello.wasm", filepath.Join(cluster.Root(t), "bin", "examples", "hello.wasm"))
	c.Apply(hello("1", 1))
	wasm := c.WaitReady("app=hello", 1)[0]
	c.Apply(fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: caller}
spec:
  restartPolicy: Never
  containers: [{name: main, image: "busybox:test", imagePullPolicy: Never, command: [sh, -c, "wget -qO- http://%s:8080/ && exit 7"]}]
`, wasm.Status.PodIP))
	var caller corev1.Pod
	c.Eventually(60*time.Second, "the caller ended", func() error {
		if err := c.Get("pod/caller", &caller); err != nil || caller.Status.Phase != corev1.PodFailed {
			return fmt.Errorf("%v, %v", caller.Status, err)
		}
		return nil
	})
	if got := caller.Status.ContainerStatuses[0].State.Terminated; got == nil || got.ExitCode != 7 {
		t.Errorf("caller %+v: %s", got, c.Run("logs", "caller"))
	}
	before := identities(t, c)
	c.Kill()
	if got := fetch(t, pod.Status.PodIP+":80"); got != "hello from a container\n" {
		t.Errorf("without an agent: %q", got)
	}
	c.Start()
	c.WaitReady("app=web", 1)
	if after := identities(t, c); after != before {
		t.Errorf("after kill -9 of the agent: %s, was %s", after, before)
	}
	if got := fetch(t, fmt.Sprintf("127.0.0.1:%d", hostPort)); got != "hello from a container\n" {
		t.Errorf("host port after kill -9 of the agent: %q", got)
	}
	c.Run("delete", "pod", "web")
	c.Eventually(30*time.Second, "the host port is closed", func() error {
		conn, err := net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", hostPort), time.Second)
		if err == nil {
			_ = conn.Close()
			return fmt.Errorf("still open")
		}
		return nil
	})
}

// identities tells the pods' containers, restarts and starts apart.
func identities(t *testing.T, c *cluster.Cluster) string {
	t.Helper()
	out := ""
	for _, p := range c.Pods("app=web") {
		for _, s := range p.Status.ContainerStatuses {
			out += fmt.Sprintf("%s %s %d %v;", p.UID, s.ContainerID, s.RestartCount, s.State.Running)
		}
	}
	return out
}

func fetch(t *testing.T, address string) string {
	t.Helper()
	client := http.Client{Timeout: 10 * time.Second}
	resp, err := client.Get("http://" + address + "/")
	if err != nil {
		return err.Error()
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return err.Error()
	}
	return string(b)
}
