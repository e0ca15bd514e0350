//go:build e2e

package e2e

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
)

// greeters answer with the name of their node, on those with the label.
const greeters = `apiVersion: apps/v1
kind: DaemonSet
metadata: {name: greeter}
spec:
  selector: {matchLabels: {app: greeter}}
  template:
    metadata: {labels: {app: greeter}}
    spec:
      runtimeClassName: wasm
      nodeSelector: {greets: "yes"}
      containers:
      - name: main
        image: hello.wasm
        env: [{name: GREETING, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]
        ports: [{containerPort: 8080, name: http}]
        readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: nearest}
spec: {trafficDistribution: PreferSameNode, selector: {app: greeter}, ports: [{port: 80, targetPort: http}]}
---
apiVersion: v1
kind: Service
metadata: {name: inside}
spec: {internalTrafficPolicy: Local, selector: {app: greeter}, ports: [{port: 80, targetPort: http}]}
---
apiVersion: v1
kind: Service
metadata: {name: outside}
spec: {type: NodePort, externalTrafficPolicy: Local, selector: {app: greeter}, ports: [{port: 80, targetPort: http}]}
---
apiVersion: v1
kind: Service
metadata: {name: early}
spec: {publishNotReadyAddresses: true, selector: {app: hello}, ports: [{port: 80, targetPort: http}]}
---
apiVersion: v1
kind: Service
metadata: {name: late}
spec: {selector: {app: hello}, ports: [{port: 80, targetPort: http}]}
---
apiVersion: v1
kind: Service
metadata: {name: elsewhere}
spec: {type: ExternalName, externalName: shop.example}
`

// Services send traffic where their policies say: only to endpoints of the
// node that it enters by, to unready ones, or to the nearest, and further once
// those are gone.
func TestTrafficPolicies(t *testing.T) {
	f := newFleet(t, 2)
	f.importHello()
	greet := func(node, whether string) {
		f.Apply(fmt.Sprintf("apiVersion: v1\nkind: Node\nmetadata: {name: %s, labels: {greets: %q}}\n", node, whether))
	}
	greet("n1", "yes")
	greet("n2", "yes")
	f.Apply(greeters + "---\n" + hello("2", 1)) // version 2 is never ready
	f.WaitReady("app=greeter", 2)
	service := func(name string) (ip string, port int32) { return clusterIP(t, f.Cluster, name) }
	greets := func(path, at, want string) {
		t.Helper()
		what := fmt.Sprintf("%s, asked in %q, is answered by %s", at, path, want)
		f.Eventually(30*time.Second, what, func() error { return greeted(path, at, want) })
		for range 8 { // once settled, by nobody else
			if err := greeted(path, at, want); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
	}
	here, n1, n2 := f.machines[0].Path(), f.machines[0], f.machines[1]
	inside, _ := service("inside")
	greets(n1.Path(), inside+":80", "n1")
	greets(n2.Path(), inside+":80", "n2")
	_, port := service("outside")
	greets("", fmt.Sprintf("%s:%d", n1.IP, port), "n1")
	greets("", fmt.Sprintf("%s:%d", n2.IP, port), "n2")
	// The server's node has no endpoint of its own, and no way to another's.
	for _, at := range []string{inside + ":80", fmt.Sprintf("127.0.0.1:%d", port)} {
		if c, err := net.DialTimeout("tcp", at, 5*time.Second); err == nil {
			_ = c.Close()
			t.Errorf("%s answers on a node without an endpoint", at)
		}
	}
	nearest, _ := service("nearest")
	greets(n1.Path(), nearest+":80", "n1")
	greets(n2.Path(), nearest+":80", "n2")
	greet("n1", "no")
	greets(here, nearest+":80", "n2")

	early, _ := service("early")
	greets(here, early+":80", "Hello")
	late, _ := service("late")
	if _, err := getOn(here, "http://"+late+"/"); err == nil {
		t.Error("a Service sends to a pod that is not ready")
	}
	f.Eventually(30*time.Second, "the name of another is told", func() error {
		return on(t, "/run/netns/"+f.agents[0].NetNS, func() error {
			q := new(dns.Msg)
			q.SetQuestion("elsewhere.default.svc.cluster.local.", dns.TypeCNAME)
			r, err := dns.Exchange(q, "10.43.0.10:53")
			if err == nil && (len(r.Answer) == 0 || !strings.Contains(r.Answer[0].String(), "shop.example.")) {
				err = fmt.Errorf("answer %v", r)
			}
			return err
		})
	})
	// Who waits for its turn is told by the pod's status, too.
	f.Eventually(time.Minute, "the node without the label has no greeter", func() error {
		for _, p := range f.Pods("app=greeter") {
			if p.Spec.NodeName == "n1" && p.Status.Phase == corev1.PodRunning {
				return fmt.Errorf("pod %s runs there", p.Name)
			}
		}
		return nil
	})
}

// greeted asks inside a network namespace ("" is this one).
func greeted(path, at, want string) error {
	ask := get
	if path != "" {
		ask = func(u string) (string, error) { return getOn(path, u) }
	}
	got, err := ask("http://" + at + "/")
	if err == nil && !strings.Contains(got, want) {
		err = fmt.Errorf("answered %q", got)
	}
	return err
}
