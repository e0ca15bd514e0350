package api

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
)

// telling says where it was told to go, and how much came.
type telling struct{}

func (telling) ServeProxy(w http.ResponseWriter, r *http.Request, p *corev1.Pod, to *url.URL, prefix string) error {
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%s %s %s %s %d", r.Method, p.Name, to, strings.TrimPrefix(prefix, "/api/v1/namespaces/default"), len(b))
	return err
}

func (w *world) runs(name, ip string) {
	w.t.Helper()
	w.want(201, "POST", pods, `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"`+name+`","labels":{"app":"web"}},"spec":{"containers":[{"name":"c","image":"i","ports":[{"containerPort":8080}]}]}}`)
	if ip != "" {
		w.want(200, "PATCH", pods+"/"+name+"/status", `{"status":{"phase":"Running","podIP":"`+ip+`","podIPs":[{"ip":"`+ip+`"}]}}`, "Content-Type", "application/merge-patch+json")
	}
}

// TestPodAndServiceProxy: who is reached, by which port, path and query.
func TestPodAndServiceProxy(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Proxy = telling{} })
	w.runs("a", "10.9.0.1")
	w.runs("b", "")
	w.runs("c", "169.254.169.254")
	const ns = "/api/v1/namespaces/default"
	w.want(201, "POST", ns+"/services", `{"apiVersion":"v1","kind":"Service","metadata":{"name":"s"},"spec":{"ports":[{"name":"web","port":80,"targetPort":8080},{"name":"tls","port":443,"targetPort":8443}]}}`)
	w.want(201, "POST", ns+"/services", `{"apiVersion":"v1","kind":"Service","metadata":{"name":"none"},"spec":{"ports":[{"port":80}]}}`)
	// The second address is no pod's: never reached, whoever wrote it.
	w.want(201, "POST", ns+"/endpoints", `{"apiVersion":"v1","kind":"Endpoints","metadata":{"name":"s"},"subsets":[
		{"addresses":[{"ip":"10.9.0.1","targetRef":{"kind":"Pod","namespace":"default","name":"a"}},{"ip":"10.9.9.9"},{"ip":"10.9.9.8","targetRef":{"kind":"Pod","namespace":"default","name":"a"}}],
		"ports":[{"name":"web","port":8080},{"name":"tls","port":8443}]}]}`)
	for path, want := range map[string]string{
		"/pods/a/proxy/":                          "GET a http://10.9.0.1:8080/ /pods/a/proxy 0",
		"/pods/a:9/proxy/x/?watch=1&q=%2f":        "GET a http://10.9.0.1:9/x/?watch=1&q=%2f /pods/a:9/proxy 0",
		"/pods/https:a:9/proxy/a%2Fb":             "GET a https://10.9.0.1:9/a%2Fb /pods/https:a:9/proxy 0",
		"/pods/http:a:/proxy/metrics?timeout=1ns": "GET a http://10.9.0.1:8080/metrics?timeout=1ns /pods/http:a:/proxy 0",
		"/services/s:web/proxy/x":                 "GET a http://10.9.0.1:8080/x /services/s:web/proxy 0",
		"/services/https:s:443/proxy/":            "GET a https://10.9.0.1:8443/ /services/https:s:443/proxy 0",
	} {
		if r := w.do("GET", ns+path, ""); r.code != 200 || string(r.body) != want {
			t.Errorf("%s: HTTP %d %s\nwant %s", path, r.code, r.body, want)
		}
	}
	for _, method := range []string{"POST", "PUT", "PATCH", "DELETE", "OPTIONS"} {
		if r := w.do(method, ns+"/pods/a/proxy", strings.Repeat("x", MaxBody+1)); r.code != 200 || string(r.body) != fmt.Sprintf("%s a http://10.9.0.1:8080/ /pods/a/proxy %d", method, MaxBody+1) {
			t.Errorf("%s: HTTP %d %s", method, r.code, r.body)
		}
	}
	for path, want := range map[string]struct {
		code int
		text string
	}{
		"/pods/b/proxy/":          {400, "address not allowed"},
		"/pods/c/proxy/":          {400, "address not allowed"},
		"/pods/a:x/proxy/":        {400, "is not the number of a port"},
		"/pods/ftp:a:1/proxy/":    {400, `invalid pod request "ftp:a:1"`},
		"/pods/gone/proxy/":       {404, `pods "gone" not found`},
		"/services/s:81/proxy/":   {503, `no service port 81 found for service "s"`},
		"/services/s:dns/proxy/":  {503, `no endpoints available for service "s:dns"`},
		"/services/s/proxy/":      {503, `no endpoints available for service "s"`},
		"/services/none/proxy/":   {404, `endpoints "none" not found`},
		"/services/gone:1/proxy/": {404, `services "gone" not found`},
		"/configmaps/x/proxy/":    {404, ""},
	} {
		m := w.want(want.code, "GET", ns+path, "")
		if text, _ := at(m, "message").(string); !strings.Contains(text, want.text) {
			t.Errorf("%s: %v", path, m)
		}
	}
	w.want(405, "OPTIONS", ns+"/pods/a", "")
}

// TestProxyRoot: relative addresses need the slash.
func TestProxyRoot(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Proxy = telling{} })
	w.runs("a", "10.9.0.1")
	c := &http.Client{Transport: w.http.Client().Transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	req, err := http.NewRequestWithContext(t.Context(), "GET", w.http.URL+pods+"/a/proxy?x=1", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer admin")
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusMovedPermanently || resp.Header.Get("Location") != pods+"/a/proxy/?x=1" {
		t.Errorf("HTTP %d %v", resp.StatusCode, resp.Header)
	}
}

// asked keeps what the authorizer was asked about proxies.
type asked struct{ got []auth.Attributes }

func (a *asked) Authorize(_ context.Context, at auth.Attributes) (bool, string) {
	if at.Subresource == "proxy" {
		a.got = append(a.got, at)
		return false, "asked"
	}
	return true, ""
}

// TestProxyVerbs: who may do what is asked by the method, as upstream; the
// query changes nothing.
func TestProxyVerbs(t *testing.T) {
	z := &asked{}
	w := newWorld(t, func(c *Config) { c.Proxy, c.Authorizer = telling{}, z })
	for method, verb := range map[string]string{"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"} {
		z.got = nil
		w.want(403, method, pods+"/http:a:80/proxy/x/y?watch=true&fieldSelector=metadata.name%3Db", "")
		if len(z.got) != 1 || z.got[0].Verb != verb || z.got[0].Resource != "pods" || z.got[0].Namespace != "default" || z.got[0].Name != "http:a:80" {
			t.Errorf("%s: %+v", method, z.got)
		}
	}
}

// TestEphemeralContainersAreRefused: what kubectl debug sends is answered with
// what else there is; nothing of the pod changes.
func TestEphemeralContainersAreRefused(t *testing.T) {
	w := newWorld(t)
	w.runs("a", "10.9.0.1")
	before := w.do("GET", pods+"/a", "")
	r := w.do("PATCH", pods+"/a/ephemeralcontainers", `{"spec":{"ephemeralContainers":[{"name":"debugger","image":"busybox"}]}}`, "Content-Type", "application/strategic-merge-patch+json")
	if r.code != 400 || !strings.Contains(string(r.body), "kubectl debug --copy-to") {
		t.Errorf("HTTP %d %s", r.code, r.body)
	}
	if after := w.do("GET", pods+"/a", ""); string(after.body) != string(before.body) {
		t.Errorf("changed: %s", after.body)
	}
}
