package podstream

import (
	"net/http/httptest"
	"testing"
)

func TestOwnOrigin(t *testing.T) {
	for origin, want := range map[string]bool{
		"": true, "https://cluster:6443": true, "https://CLUSTER:6443": true, "http://localhost": true, "http://localhost:8001": true,
		"http://127.0.0.1:8001": true, "http://[::1]:8001": true,
		"https://cluster": false, "https://evil.example": false, "https://localhost.evil.example": false, "http://10.0.0.1": false,
		"null": false, "://": false,
	} {
		r := httptest.NewRequest("GET", "https://cluster:6443/api/v1/namespaces/a/pods/b/exec", nil)
		if origin != "" {
			r.Header.Set("Origin", origin)
		}
		if got := ownOrigin(r); got != want {
			t.Errorf("%q: %v", origin, got)
		}
	}
}
