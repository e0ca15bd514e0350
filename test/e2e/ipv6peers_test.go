//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

const boxOverIPv6 = `---
apiVersion: v1
kind: Pod
metadata: {name: box, labels: {app: box}}
spec:
  nodeSelector: {kubernetes.io/hostname: n2}
  terminationGracePeriodSeconds: 1
  containers: [{name: main, image: "busybox:test", imagePullPolicy: Never, command: [sh, -c, "mkdir /www; echo box > /www/index.html; exec httpd -f -p [::]:8080 -h /www"]}]
---
apiVersion: v1
kind: Service
metadata: {name: box}
spec: {ipFamilies: [IPv6], selector: {app: box}, ports: [{port: 80, targetPort: 8080}]}
`

// A Service of IPv6 alone reaches pods of other nodes, modules and containers,
// by the address of IPv6 that nodes tell besides their own; a node that has none
// says so, until it has.
func TestIPv6ServicesReachOtherNodes(t *testing.T) {
	site := cluster.NewSite(t)
	n := rand.IntN(1 << 12)
	c := cluster.NewControlPlane(t, "--listen", site.Host()+":"+strconv.Itoa(20000+rand.IntN(9999)),
		"--pod-cidr", fmt.Sprintf("198.%d.%d.0/21,fd42:%x::/56", 18+n/32%2, n%32*8, n), "--service-cidr", fmt.Sprintf("10.43.0.0/16,fd43:%x::/112", n))
	machines, six := map[string]*cluster.Machine{}, map[string]string{"n1": "21", "n2": "22"}
	containers := true
	for _, p := range []string{"runc", "conmon", "busybox"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Logf("SKIPPED: containers: %s is not installed", p)
			containers = false
		}
	}
	for _, name := range []string{"n1", "n2", "n3"} {
		m := site.NewMachine()
		machines[name] = m
		if six[name] != "" {
			six[name] = m.AddIPv6(six[name])
		}
		a := cluster.NewAgent(t, name, m)
		a.Import("hello.wasm", filepath.Join(cluster.Root(t), "bin", "examples", "hello.wasm"))
		if containers && name == "n2" {
			a.ImportBusybox("busybox:test", nil)
		}
		a.Start("--join", strings.TrimSpace(c.Run("token", "create")))
	}
	for name := range machines {
		c.Eventually(time.Minute, name+" is Ready", func() error { return c.NodeReady(name) })
	}
	c.Apply(strings.Replace(hello("1", 1), "runtimeClassName: wasm", "runtimeClassName: wasm\n      nodeSelector: {kubernetes.io/hostname: n2}", 1) + "---\n" +
		strings.Replace(helloService, "  type: NodePort\n", "  type: NodePort\n  ipFamilies: [IPv6]\n", 1))
	c.Run("rollout", "status", "deployment", "hello", "--timeout", "2m")
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := c.Try("get", "endpointslices,services,pods", "-o", "yaml")
			t.Log(out)
		}
	})
	addresses := func(name string) func() error {
		return func() error {
			out, err := c.Try("get", "node/"+name, "-o", "json")
			if err != nil {
				return err
			}
			var node corev1.Node
			if err := json.Unmarshal([]byte(out), &node); err != nil {
				return err
			}
			want, got := []string{machines[name].IP, six[name]}, []string(nil)
			for _, a := range node.Status.Addresses {
				if a.Type == corev1.NodeInternalIP {
					got = append(got, a.Address)
				}
			}
			if want = slices.DeleteFunc(want, func(s string) bool { return s == "" }); !slices.Equal(got, want) {
				return fmt.Errorf("%v, want %v", got, want)
			}
			return nil
		}
	}
	for name := range machines {
		c.Eventually(time.Minute, "addresses of "+name, addresses(name))
	}
	ip, port := clusterIP(t, c, "hello")
	from := func(name string, urls ...string) {
		t.Helper()
		for _, u := range urls {
			patiently(t, u+" from "+name, func() error { _, err := getOn(machines[name].Path(), u); return err })
		}
	}
	service := "http://" + net.JoinHostPort(ip, "80") + "/"
	if containers {
		c.Apply(boxOverIPv6)
		c.WaitReady("app=box", 1)
		box, _ := clusterIP(t, c, "box")
		from("n1", "http://"+net.JoinHostPort(box, "80")+"/")
	}
	from("n2", service)
	from("n1", service, fmt.Sprintf("http://[%s]:%d/", six["n1"], port), fmt.Sprintf("http://[%s]:%d/", six["n2"], port))
	events := func(want bool) func() error {
		return func() error {
			out := c.Run("events", "-A")
			if told := strings.Contains(out, "NoAddressOfFamily"); told != want {
				return fmt.Errorf("told %v: %s", told, out)
			}
			return nil
		}
	}
	c.Eventually(time.Minute, "n3 tells that it has no address", events(true))
	six["n3"] = machines["n3"].AddIPv6("23")
	c.Eventually(2*time.Minute, "n3 has one now", addresses("n3"))
	c.Eventually(time.Minute, "that is over", events(false))
	from("n3", service)
}
