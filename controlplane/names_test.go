package controlplane

import (
	"crypto/tls"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Pods are told to reach the API at the address of the Service
// default/kubernetes: the certificate has it, also after an address changed.
func TestCertificateHasTheServiceAddress(t *testing.T) {
	s := startServer(t, "one", t.TempDir(), nil)
	s.waitRoles("one=leader")
	var svc corev1.Service
	for end := time.Now().Add(20 * time.Second); svc.Spec.ClusterIP == ""; <-time.After(50 * time.Millisecond) {
		if code, body, _ := s.do(s.admin, "GET", "/api/v1/namespaces/default/services/kubernetes", nil); code == http.StatusOK {
			must(t, json.Unmarshal([]byte(body), &svc))
		} else if time.Now().After(end) {
			t.Fatalf("%d %s", code, body)
		}
	}
	check := func() {
		t.Helper()
		for _, name := range []string{svc.Spec.ClusterIP, "kubernetes.default.svc"} {
			c, err := tls.Dial("tcp", strings.TrimPrefix(s.url, "https://"), &tls.Config{RootCAs: s.ca.Pool(), ServerName: name, MinVersion: tls.VersionTLS13})
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			_ = c.Close()
		}
	}
	check()
	s.Moved([]string{"192.0.2.7:6443"}, "")
	check()
}
