package registry

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

func TestRegistriesFileIsStrict(t *testing.T) {
	c, err := ParseConfig([]byte("mirrors:\n  docker.io: {endpoint: ['https://m.lan/v2/hub']}\n  '*': {endpoint: ['http://all.lan:5000']}\n  own.lan: {endpoint: ['http://own.lan']}\n"))
	if err != nil {
		t.Fatal(err)
	}
	for registry, want := range map[string][]string{
		"docker.io":      {"https://m.lan/v2/hub/v2", "https://registry-1.docker.io/v2"},
		"own.lan":        {"http://own.lan/v2"},
		"quay.io":        {"http://all.lan:5000/v2", "https://quay.io/v2"},
		"127.0.0.1:5000": {"http://all.lan:5000/v2", "http://127.0.0.1:5000/v2"},
	} {
		var got []string
		for _, e := range c.endpoints(registry) {
			got = append(got, e.base)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v, want %v", registry, got, want)
		}
	}
	for bad, want := range map[string]string{
		"mirror: {}": "mirror not found", "mirrors: {a/b: {}}": "without https://", "mirrors: {a: {endpoint: [a.lan]}}": "is not https://HOST",
		"configs: {a: {tls: {ca_file: /none}}}": "ca_file", "configs: {a: {tls: {key_file: /none}}}": "belong together", "a: b\n---\nc: d": "not found", "{": "yaml",
	} {
		if _, err := ParseConfig([]byte(bad)); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v, want %q", bad, err, want)
		}
	}
	if c, err := ParseConfig(nil); err != nil || len(c.Mirrors) > 0 {
		t.Error(c, err)
	}
}

func TestPullSecrets(t *testing.T) {
	got, err := ParseDockerConfig([]byte(`{"auths":{"r.lan":{"auth":"dTpwOnc="},"https://index.docker.io/v1/":{"username":"h","password":"x"},"r.lan/team":{"identitytoken":"t"},"*.wild.lan:5000":{"username":"w"}}}`))
	if err != nil {
		t.Fatal(err)
	}
	users := func(registry, repository string) (out []string) {
		for _, c := range matching(got, registry, repository) {
			out = append(out, c.Username+c.Token)
		}
		return out
	}
	for _, c := range []struct {
		registry, repository string
		want                 []string
	}{
		{"r.lan", "team/app", []string{"t", "u"}}, {"r.lan", "teammate/app", []string{"u"}}, {"docker.io", "library/x", []string{"h"}},
		{"a.wild.lan:5000", "x", []string{"w"}}, {"a.b.wild.lan:5000", "x", nil}, {"a.wild.lan", "x", nil}, {"evil.lan", "x", nil},
	} {
		if u := users(c.registry, c.repository); !reflect.DeepEqual(u, c.want) {
			t.Errorf("%s/%s: %v, want %v", c.registry, c.repository, u, c.want)
		}
	}
	if c := matching(got, "r.lan", "x"); len(c) != 1 || c[0] != (workload.RegistryCredential{Registry: "r.lan", Username: "u", Password: "p:w"}) {
		t.Errorf("%+v", c)
	}
	if old, err := ParseDockerConfig([]byte(`{"r.lan":{"auth":"dTpw"}}`)); err != nil || len(old) != 1 {
		t.Error(old, err)
	}
	for _, bad := range []string{"", "[]", `{"auths":{"a":{"auth":"!!secret!!"}}}`, `{"auths":{"a":{"auth":"c2VjcmV0"}}}`} {
		if _, err := ParseDockerConfig([]byte(bad)); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestRetryAfterAndChallenges(t *testing.T) {
	const now = "Mon, 02 Jan 2006 15:04:05 GMT"
	for v, want := range map[string]time.Duration{"7": 7 * time.Second, "": 0, "-1": 0, "x": 0, "999999": time.Hour, "Mon, 02 Jan 2006 15:05:05 GMT": time.Minute, "Sun, 01 Jan 2006 15:05:05 GMT": 0} {
		if got := retryAfter(v, now); got != want {
			t.Errorf("%q: %s, want %s", v, got, want)
		}
	}
	scheme, p := parseChallenge(`Bearer realm="https://a/t?x=1,2",service="r \"q\"", scope=repository:a:pull`)
	if scheme != "bearer" || !reflect.DeepEqual(p, map[string]string{"realm": "https://a/t?x=1,2", "service": `r "q"`, "scope": "repository:a:pull"}) {
		t.Error(scheme, p)
	}
}
