package registry

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// ParseDockerConfig reads a pull secret: .dockerconfigjson, or the older
// .dockercfg, which is what is under auths alone. Errors never show content.
func ParseDockerConfig(b []byte) ([]workload.RegistryCredential, error) {
	type auth struct {
		Username, Password, Auth string
		IdentityToken            string `json:"identitytoken"`
	}
	var file struct {
		Auths map[string]auth `json:"auths"`
	}
	if err := json.Unmarshal(b, &file); err != nil {
		return nil, errors.New("it is no JSON of docker's config.json")
	}
	auths := file.Auths
	if auths == nil {
		if json.Unmarshal(b, &auths) != nil {
			return nil, errors.New("it has no key auths")
		}
	}
	var out []workload.RegistryCredential
	for key, a := range auths {
		c := workload.RegistryCredential{Registry: key, Username: a.Username, Password: a.Password, Token: a.IdentityToken}
		if a.Auth != "" {
			raw, err := base64.StdEncoding.DecodeString(a.Auth)
			user, password, ok := strings.Cut(string(raw), ":")
			if err != nil || !ok {
				return nil, fmt.Errorf("auth of %s is not base64 of USER:PASSWORD", key)
			}
			c.Username, c.Password = user, strings.TrimRight(password, "\x00")
		}
		out = append(out, c)
	}
	// Map order must not decide; the longest path is the closest.
	slices.SortFunc(out, func(a, b workload.RegistryCredential) int {
		if d := len(b.Registry) - len(a.Registry); d != 0 {
			return d
		}
		return strings.Compare(a.Registry, b.Registry)
	})
	return out, nil
}

// matching keeps the credentials for a repository, in order, as the kubelet's
// keyring does: hosts may have * for a label, paths count by whole elements.
func matching(all []workload.RegistryCredential, registry, repository string) (out []workload.RegistryCredential) {
	for _, c := range all {
		host, prefix := splitKey(c.Registry)
		if !hostMatches(host, registry) {
			continue
		}
		if prefix == "" || repository == prefix || strings.HasPrefix(repository, prefix+"/") {
			out = append(out, c)
		}
	}
	return out
}

func splitKey(key string) (host, prefix string) {
	key = strings.TrimPrefix(strings.TrimPrefix(key, "https://"), "http://")
	host, prefix, _ = strings.Cut(strings.TrimRight(key, "/"), "/")
	if prefix == "v1" || prefix == "v2" {
		prefix = ""
	}
	return host, prefix
}

func hostMatches(pattern, host string) bool {
	hub := func(h string) bool { return h == dockerHub || h == "index.docker.io" || h == dockerHubHost }
	if hub(pattern) && hub(host) {
		return true
	}
	p, h := strings.Split(pattern, "."), strings.Split(host, ".")
	if len(p) != len(h) {
		return false
	}
	for i := range p {
		if ok, err := path.Match(p[i], h[i]); err != nil || !ok {
			return false
		}
	}
	return true
}
