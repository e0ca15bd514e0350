//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/test/cluster"
)

// A Service of both families is reached by its addresses of both, by its name,
// and by node ports over both; one of UDP by its address and node ports; and a
// pod that ends says who is still connected.
func TestBothFamiliesAndDatagrams(t *testing.T) {
	s := cluster.NewSite(t)
	m := s.NewMachine()
	n := rand.IntN(1 << 12)
	c := cluster.New(t, "--node-address", s.Host(), "--listen", s.Host()+":"+strconv.Itoa(20000+rand.IntN(9999)),
		"--pod-cidr", fmt.Sprintf("198.%d.%d.0/21,fd42:%x::/56", 18+n/32%2, n%32*8, n), "--service-cidr", fmt.Sprintf("10.43.0.0/16,fd43:%x::/112", n))
	a := cluster.NewAgent(t, "n1", m)
	a.Import("hello.wasm", filepath.Join(cluster.Root(t), "bin", "examples", "hello.wasm"))
	a.Start("--join", strings.TrimSpace(c.Run("token", "create")))
	c.Eventually(time.Minute, "n1 is Ready", func() error { return c.NodeReady("n1") })
	udp := udpEcho(t, s.Host())
	c.Apply(strings.Replace(strings.Replace(hello("1", 1), "runtimeClassName: wasm", "runtimeClassName: wasm\n      nodeSelector: {kubernetes.io/hostname: n1}", 1),
		"        readinessProbe:", "        lifecycle: {preStop: {sleep: {seconds: 25}}}\n        readinessProbe:", 1) + "---\n" +
		strings.Replace(helloService, "  type: NodePort\n", "  type: NodePort\n  ipFamilyPolicy: RequireDualStack\n", 1) + fmt.Sprintf(`---
apiVersion: v1
kind: Service
metadata: {name: udp}
spec: {type: NodePort, ports: [{name: u, port: 7000, protocol: UDP}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: udp-1, labels: {kubernetes.io/service-name: udp}}
addressType: IPv4
ports: [{name: u, port: %d, protocol: UDP}]
endpoints: [{addresses: [%s], conditions: {ready: true}}]
`, udp.Port(), udp.Addr()))
	c.Run("rollout", "status", "deployment", "hello", "--timeout", "2m")
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := c.Try("get", "endpointslices,services,pods", "-o", "wide")
			t.Log(out)
			b, _ := os.ReadFile(filepath.Join(a.Dir, "run", "proxy", "log"))
			t.Logf("proxy: %s", b)
		}
	})
	var web, dgram corev1.Service
	if err := errors.Join(c.Get("service/hello", &web), c.Get("service/udp", &dgram)); err != nil {
		t.Fatal(err)
	}
	if len(web.Spec.ClusterIPs) != 2 || !netip.MustParseAddr(web.Spec.ClusterIPs[1]).Is6() {
		t.Fatalf("addresses %v", web.Spec.ClusterIPs)
	}
	port := strconv.Itoa(int(web.Spec.Ports[0].NodePort))
	for _, at := range []string{net.JoinHostPort(web.Spec.ClusterIPs[0], "80"), net.JoinHostPort(web.Spec.ClusterIPs[1], "80"), "127.0.0.1:" + port, "[::1]:" + port, m.IP + ":" + port} {
		patiently(t, "TCP at "+at, func() error {
			_, err := getOn(m.Path(), "http://"+at+"/")
			return err
		})
	}
	port = strconv.Itoa(int(dgram.Spec.Ports[0].NodePort))
	for _, at := range []string{net.JoinHostPort(dgram.Spec.ClusterIP, "7000"), "127.0.0.1:" + port, "[::1]:" + port, m.IP + ":" + port} {
		patiently(t, "UDP at "+at, func() error { return on(t, m.Path(), func() error { return askUDP(at) }) })
	}
	patiently(t, "the name has both addresses", func() error {
		return on(t, "/run/netns/"+a.NetNS, func() error {
			q := new(dns.Msg)
			q.SetQuestion("hello.default.svc.cluster.local.", dns.TypeAAAA)
			r, err := dns.Exchange(q, "10.43.0.10:53")
			if err == nil && (len(r.Answer) != 1 || !strings.HasSuffix(r.Answer[0].String(), web.Spec.ClusterIPs[1])) {
				err = fmt.Errorf("answer %v", r)
			}
			return err
		})
	})
	drainsInTheStatus(t, c, m)
}

// drainsInTheStatus holds a connection to a pod that is deleted.
func drainsInTheStatus(t *testing.T, c *cluster.Cluster, m *cluster.Machine) {
	t.Helper()
	pod := c.Pods("app=hello")[0]
	var conn net.Conn
	if err := on(t, m.Path(), func() (err error) {
		conn, err = net.Dial("tcp", net.JoinHostPort(pod.Status.PodIP, "8080"))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	c.Run("delete", "pod", pod.Name, "--wait=false")
	told := func(status corev1.ConditionStatus, message string) func() error {
		return func() error {
			var p corev1.Pod
			if err := c.Get("pod/"+pod.Name, &p); err != nil {
				return err
			}
			for _, cond := range p.Status.Conditions {
				if cond.Type == manifests.ConditionDraining && cond.Status == status && strings.Contains(cond.Message, message) {
					return nil
				}
			}
			return fmt.Errorf("conditions %v", p.Status.Conditions)
		}
	}
	c.Eventually(20*time.Second, "the status says that a connection is open", told(corev1.ConditionTrue, "are still open"))
	if out := c.Run("describe", "pod", pod.Name); !strings.Contains(out, "connections are still open") {
		t.Errorf("describe says nothing of it:\n%s", out)
	}
	_ = conn.Close()
}

// udpEcho answers datagrams on the site.
func udpEcho(t *testing.T, host string) netip.AddrPort {
	t.Helper()
	c, err := net.ListenPacket("udp", host+":0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	go func() {
		b := make([]byte, 2048)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = c.WriteTo(b[:n], from)
		}
	}()
	return netip.MustParseAddrPort(c.LocalAddr().String())
}

func askUDP(addr string) error {
	c, err := net.Dial("udp", addr)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(2 * time.Second))
	if _, err := c.Write([]byte("dunlin")); err != nil {
		return err
	}
	b := make([]byte, 64)
	n, err := c.Read(b)
	if err == nil && string(b[:n]) != "dunlin" {
		err = fmt.Errorf("answer %q", b[:n])
	}
	return err
}
