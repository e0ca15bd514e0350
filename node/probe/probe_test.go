package probe

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func TestRun(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("/ok", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/moved", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/nowhere", http.StatusFound) })
	mux.HandleFunc("/bad", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
	mux.HandleFunc("/hang", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	mux.HandleFunc("/header", func(w http.ResponseWriter, r *http.Request) {
		if r.Host != "shop" || r.Header.Get("X") != "1" || r.URL.RawQuery != "q=2" {
			w.WriteHeader(http.StatusBadRequest)
		}
	})
	srv := httptest.NewServer(mux)
	defer srv.Close()
	dial := func(ctx context.Context, network string, port int32) (net.Conn, error) {
		if port != 80 {
			return (&net.Dialer{}).DialContext(ctx, network, "127.0.0.1:1")
		}
		return (&net.Dialer{}).DialContext(ctx, network, srv.Listener.Addr().String())
	}
	ports := func(p intstr.IntOrString) (int32, error) { return p.IntVal, nil }
	get := func(path string, port int32, h ...corev1.HTTPHeader) *corev1.Probe {
		return &corev1.Probe{TimeoutSeconds: 1, ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: path, Port: intstr.FromInt32(port), HTTPHeaders: h}}}
	}
	tcp := func(port int32) *corev1.Probe {
		return &corev1.Probe{ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(port)}}}
	}
	host, text, err := net.SplitHostPort(srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	number, err := strconv.ParseInt(text, 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	elsewhere := func(p *corev1.Probe) *corev1.Probe { // another host than the pod
		if p.HTTPGet != nil {
			p.HTTPGet.Host = host
		} else {
			p.TCPSocket.Host = host
		}
		return p
	}
	there := int32(number)
	for name, c := range map[string]struct {
		p    *corev1.Probe
		ok   bool
		says string
	}{
		"ok":       {get("/ok", 80), true, ""},
		"redirect": {get("/moved", 80), true, ""},
		"bad":      {get("/bad", 80), false, "status 503"},
		"hang":     {get("/hang", 80), false, "no answer within 1s"},
		"header":   {get("/header?q=2", 80, corev1.HTTPHeader{Name: "host", Value: "shop"}, corev1.HTTPHeader{Name: "X", Value: "1"}), true, ""},
		"refused":  {get("/ok", 81), false, "refused"},
		"tcp":      {tcp(80), true, ""},
		"tcp no":   {tcp(81), false, "refused"},
		"a host":   {elsewhere(get("/ok", there)), true, ""},
		"bad host": {elsewhere(get("/bad", there)), false, "GET /bad at " + host + ":" + text + ": status 503"},
		"tcp host": {elsewhere(tcp(there)), true, ""},
		"no host":  {elsewhere(tcp(1)), false, "refused"},
		"exec":     {&corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{}}}, false, "not supported"},
	} {
		t.Run(name, func(t *testing.T) {
			ok, msg := Run(t.Context(), c.p, dial, ports, nil)
			if ok != c.ok || !strings.Contains(msg, c.says) || (ok && msg != "") {
				t.Fatalf("got %v %q", ok, msg)
			}
		})
	}
}
