package images

import (
	"bytes"
	"net/http"
	"strings"
	"testing"

	"github.com/dunlin-project/dunlin/runtime/images/registry"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// TestAnImageIsOfWhoMayPullIt: what one namespace pulled with its login no
// other one gets without a login of its own, by whatever name; nobody who had
// it loses it while the registry is away; and what came without a login, or by
// hand, is everybody's.
func TestAnImageIsOfWhoMayPullIt(t *testing.T) {
	needRoot(t)
	h := newHub(t)
	m := makeImage(t, amd64(), gzipped, tarOf(t, file("x", "secret")))
	other := makeImage(t, Platform{"linux", "arm64", "v8"}, gzipped, tarOf(t, file("x", "y")))
	digest := push(t, h.srv.URL, "private", "1", nil, m, other)
	push(t, h.srv.URL, "public", "1", nil, makeImage(t, amd64(), gzipped, tarOf(t, file("x", "all"))))
	base := tarOf(t, file("base", "all"))
	push(t, h.srv.URL, "private", "3", nil, makeImage(t, amd64(), gzipped, base, tarOf(t, file("more", "x"))))
	push(t, h.srv.URL, "private", "4", nil, makeImage(t, amd64(), gzipped, base))
	h.setFault(func(w http.ResponseWriter, r *http.Request) http.ResponseWriter {
		if user, password, ok := r.BasicAuth(); ok && user == "u" && password == "p" || strings.Contains(r.URL.Path, "/public/") {
			return w
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="hub"`)
		w.WriteHeader(http.StatusUnauthorized)
		return nil
	})
	store := testStore(t)
	try := func(namespace, image, policy string, login bool, refusal string) {
		t.Helper()
		req := workload.ImageRequest{Image: h.host + "/" + image, Policy: policy, PodNamespace: namespace}
		if login {
			req.Credentials = []workload.RegistryCredential{{Registry: h.host, Username: "u", Password: "p"}}
		}
		_, err := testPuller(t, store, registry.Config{}).Image(t.Context(), req, nil)
		if (err == nil) != (refusal == "") || err != nil && !contains(err, refusal) {
			t.Errorf("%s in %s (%s, login %v): %v, want %q", image, namespace, policy, login, err, refusal)
		}
	}
	byDigest, child := "private@"+digest, "private@"+m.manifest
	try("a", "private:1", "IfNotPresent", true, "")
	try("b", "private:1", "IfNotPresent", false, "whether namespace b may have it")
	try("b", byDigest, "IfNotPresent", false, "401")
	try("b", child, "IfNotPresent", false, "401")
	try("b", "private:1", "Never", true, "not for namespace b")
	try("b", "private:1", "Always", false, "401")
	try("c", "private:1", "IfNotPresent", true, "")
	try("c", child, "IfNotPresent", false, "") // it has shown it
	try("d", "private:1", "Always", true, "")
	try("d", "private:1", "Never", false, "")
	try("a", "public:1", "IfNotPresent", true, "")
	try("b", "public:1", "Never", false, "")
	// All layers of the second are here before it is pulled; it is private all
	// the same.
	try("a", "private:3", "IfNotPresent", true, "")
	try("a", "private:4", "IfNotPresent", true, "")
	try("b", "private:4", "IfNotPresent", false, "whether namespace b may have it")
	store = openStore(t, store.cfg.Dir)
	h.srv.Close()
	for _, n := range []string{"a", "c", "d"} {
		try(n, "private:1", "IfNotPresent", false, "")
		try(n, "private:1", "Always", false, "")
	}
	try("b", "private:1", "IfNotPresent", true, "whether namespace b may have it")
	try("b", "private:1", "Always", false, "refused")

	byHand := testStore(t)
	if _, err := byHand.Import(t.Context(), "", bytes.NewReader(ociLayout(t, h.host+"/private:1", m)), nil); err != nil {
		t.Fatal(err)
	}
	store = byHand
	try("b", "private:1", "Never", false, "")
	try("b", "private:1", "IfNotPresent", false, "")
}
