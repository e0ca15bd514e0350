//go:build e2e

package e2e

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	networkingv1 "k8s.io/api/networking/v1"

	"github.com/dunlin-project/dunlin/node/ingress"
	"github.com/dunlin-project/dunlin/test/cluster"
)

// tlsSecret is the manifest of a Secret with a self-signed certificate, and
// the certificate.
func tlsSecret(t *testing.T, name string, hosts ...string) (manifest string, cert []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "test"}, DNSNames: hosts, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	k, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	cert = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	b64 := base64.StdEncoding.EncodeToString
	return fmt.Sprintf("apiVersion: v1\nkind: Secret\nmetadata: {name: %s}\ntype: kubernetes.io/tls\ndata: {tls.crt: %s, tls.key: %s}\n", name,
		b64(cert), b64(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: k}))), cert
}

func webIngress(name, host, secret, rest string) string {
	out := fmt.Sprintf("apiVersion: networking.k8s.io/v1\nkind: Ingress\nmetadata: {name: %s}\nspec:\n%s", name, rest)
	if secret != "" {
		out += fmt.Sprintf("  tls: [{hosts: [%s], secretName: %s}]\n", host, secret)
	}
	return out + fmt.Sprintf("  rules: [{host: %s, http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: hello, port: {name: http}}}}]}}]\n", host)
}

// curl asks as people do, on a machine; it prints the protocol, the status and
// the body.
func curl(m *cluster.Machine, cert []byte, args ...string) (string, error) {
	ca, err := os.CreateTemp("", "dunlin-ca")
	if err != nil {
		return "", err
	}
	defer func() { _ = os.Remove(ca.Name()) }()
	_, _ = ca.Write(cert)
	_ = ca.Close()
	cmd := exec.Command("nsenter", append([]string{"--net=" + m.Path(), "curl", "-sS", "--max-time", "10", "-w", "\nHTTP/%{http_version} %{http_code}", "--cacert", ca.Name(),
		"--resolve", "a.example:443:127.0.0.1", "--resolve", "a.example:80:127.0.0.1", "--resolve", "b.example:80:127.0.0.1", "--resolve", "b.example:443:127.0.0.1"}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("curl: %w: %s", err, out)
	}
	return string(out), nil
}

// An Ingress is served by the labelled node, over HTTP, HTTP/2 and TLS; a new
// certificate comes live; what is wrong is told; killing the agent cuts
// nothing; and with every server off it goes on, also after a start of the
// node.
func TestIngress(t *testing.T) {
	f := newFleet(t, 2)
	f.importHello()
	first, cert := tlsSecret(t, "cert", "a.example")
	f.Apply(strings.Replace(hello("1", 2), "runtimeClassName: wasm", "runtimeClassName: wasm\n      nodeSelector: {kubernetes.io/hostname: n2}", 1) + "---\n" + helloService + "---\n" + first +
		"---\n" + webIngress("web", "a.example", "cert", "") + "---\napiVersion: v1\nkind: Node\nmetadata: {name: n1, labels: {dunlin.dev/ingress: \"true\"}}\n")
	f.Run("rollout", "status", "deployment", "hello", "--timeout", "2m")
	m := f.machines[0]
	answers := func(when, want string, args ...string) {
		t.Helper()
		patiently(t, strings.Join(args, " ")+" "+when, func() error {
			out, err := curl(m, cert, args...)
			if err == nil && !strings.HasSuffix(out, want) {
				err = fmt.Errorf("%q, want %q", out, want)
			}
			return err
		})
	}
	all := func(when string) {
		t.Helper()
		answers(when, "HTTP/1.1 200", "http://a.example/")
		answers(when, "HTTP/2 200", "https://a.example/")
		answers(when, "HTTP/1.1 200", "--http1.1", "https://a.example/")
	}
	all("at first")
	answers("without a rule", "404: no rule for this host and path\n\nHTTP/1.1 404", "http://b.example/")
	var ing networkingv1.Ingress
	f.Eventually(30*time.Second, "the address is in the status", func() error {
		if err := f.Get("ingress/web", &ing); err != nil {
			return err
		}
		if l := ing.Status.LoadBalancer.Ingress; len(l) != 1 || ing.Spec.IngressClassName == nil || *ing.Spec.IngressClassName != "dunlin" {
			return fmt.Errorf("status %v", ing.Status)
		}
		return nil
	})
	if out := f.Run("get", "ingress"); !strings.Contains(out, "a.example") || !strings.Contains(out, ing.Status.LoadBalancer.Ingress[0].IP) || !strings.Contains(out, "80, 443") {
		t.Errorf("table: %s", out)
	}
	// Only there: the other nodes have no process and no certificate. The
	// server's node had them until n1 got its label.
	patiently(t, "an ingress on the labelled node alone", func() error {
		for _, dir := range []string{f.Dir, f.agents[1].Dir} {
			if _, err := ingress.Ask(filepath.Join(dir, "run", "ingress")); err == nil {
				return fmt.Errorf("there is an ingress in %s", dir)
			}
		}
		return nil
	})
	badIngresses(t, f)

	// A connection that is kept sees neither the new certificate nor the end of
	// the agent.
	kept := keepOpen(t, m, cert)
	second, next := tlsSecret(t, "cert", "a.example")
	f.Apply(second)
	old := cert
	cert = next
	all("with a new certificate")
	if out, err := curl(m, old, "https://a.example/"); err == nil {
		t.Errorf("the old certificate is still there: %s", out)
	}
	kept("with a new certificate")
	pid := ingressOf(t, f.agents[0].Dir)
	f.agents[0].Kill()
	kept("with the agent dead")
	f.agents[0].Start()
	f.Eventually(time.Minute, "n1 is Ready", func() error { return f.NodeReady("n1") })
	kept("with the agent back")
	if now := ingressOf(t, f.agents[0].Dir); now != pid {
		t.Fatalf("the ingress was process %d and is %d", pid, now)
	}
	patiently(t, "figures", func() error {
		out, err := overSocket(filepath.Join(f.agents[0].Dir, "run", "agent.sock"), "/metrics")
		if err == nil && (!strings.Contains(out, `dunlin_ingress_requests_total{code="2xx"}`) || !strings.Contains(out, `dunlin_ingress_faults_total{reason="no-rule"}`)) {
			err = errors.New("they are not there")
		}
		return err
	})
	// The new agent feeds the old process.
	f.Apply(strings.Replace(webIngress("second", "b.example", "", ""), "name: second}", "name: second, annotations: {dunlin.dev/backend-timeout: 5s}}", 1))
	answers("with a rule", "HTTP/1.1 200", "http://b.example/")

	// As after a boot of the node with all servers off.
	f.Kill()
	all("with all servers dead")
	kept("with all servers dead")
	a := f.agents[0]
	a.Stop(syscall.SIGTERM)
	if err := syscall.Kill(ingressOf(t, a.Dir), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	a.Start()
	all("after a start without servers")
	f.Start() // for an orderly end
}

func ingressOf(t *testing.T, dir string) int {
	t.Helper()
	st, err := ingress.Ask(filepath.Join(dir, "run", "ingress"))
	if err != nil {
		t.Fatal(err)
	}
	return st.PID
}

// keepOpen opens a TLS connection on a machine, and returns what asks on it.
func keepOpen(t *testing.T, m *cluster.Machine, cert []byte) func(when string) {
	t.Helper()
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(cert)
	var conn *tls.Conn
	if err := on(t, m.Path(), func() (err error) {
		conn, err = tls.Dial("tcp", "127.0.0.1:443", &tls.Config{RootCAs: pool, ServerName: "a.example"})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	r := bufio.NewReader(conn)
	return func(when string) {
		t.Helper()
		_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: a.example\r\n\r\n"); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s", when, resp.Status)
		}
	}
}

// badIngresses are answered with an event that says what is wrong, or refused
// with path and reason.
func badIngresses(t *testing.T, f *fleet) {
	t.Helper()
	f.Apply(webIngress("unknown", "b.example", "", "  ingressClassName: nginx\n") +
		"---\n" + webIngress("missing", "c.example", "nowhere", "") +
		"---\n" + webIngress("nokey", "d.example", "nokey", "") +
		"---\n" + strings.Replace(webIngress("wronghost", "e.example", "cert", ""), "name: hello", "name: ghost", 1) +
		"---\n" + webIngress("younger", "a.example", "", "") + // its name is the later one, too, for those of one second
		"---\napiVersion: v1\nkind: Secret\nmetadata: {name: nokey}\nstringData: {tls.crt: x}\n")
	f.Eventually(30*time.Second, "events say what is wrong", func() error {
		out := f.Run("events")
		for _, want := range []string{
			`there is no IngressClass "nginx": nobody serves this Ingress`,
			"there is no Secret default/nowhere: HTTPS for c.example is refused",
			"Secret default/nokey has no tls.key",
			"is not for e.example, but for a.example",
			"there is no Service default/ghost",
			`host "a.example" path / is that of the older Ingress default/web`,
		} {
			if !strings.Contains(out, want) {
				return fmt.Errorf("no event says: %s\n%s\n%s", want, out, f.Run("get", "ingress", "-o", "yaml"))
			}
		}
		return nil
	})
	for text, want := range map[string]string{
		strings.Replace(webIngress("x", "f.example", "", ""), "path: /,", "path: x,", 1):                                                    "path: Invalid value: \"x\": must be an absolute path",
		strings.Replace(webIngress("x", "f.example", "", ""), "port: {name: http}", "port: {}", 1):                                          "port name or number is required",
		strings.Replace(webIngress("x", "1.2.3.4", "", ""), "spec:", "spec:", 1):                                                            "must be a DNS name, not an IP address",
		strings.Replace(webIngress("x", "f.example", "", ""), "{name: x}", "{name: x, annotations: {dunlin.dev/backend-timeout: soon}}", 1): "must be a duration from 1s to 24h",
	} {
		if out, err := f.TryIn(text, "apply", "-f", "-"); err == nil || !bytes.Contains([]byte(err.Error()+out), []byte(want)) {
			t.Errorf("want %q, got %v %s", want, err, out)
		}
	}
}
