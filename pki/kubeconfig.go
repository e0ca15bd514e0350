package pki

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"sigs.k8s.io/yaml"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
)

// Kubeconfig is a kubectl configuration with everything embedded; server is
// a URL such as https://10.0.0.1:6443.
func Kubeconfig(name, server string, caPEM []byte, cert *x509.Certificate, key *ecdsa.PrivateKey) ([]byte, error) {
	k, err := encodeKey(key)
	if err != nil {
		return nil, err
	}
	// []byte fields become base64, as kubectl wants them.
	type cluster struct {
		Server string `json:"server"`
		CA     []byte `json:"certificate-authority-data"`
	}
	type user struct {
		Cert []byte `json:"client-certificate-data"`
		Key  []byte `json:"client-key-data"`
	}
	type context struct {
		Cluster string `json:"cluster"`
		User    string `json:"user"`
	}
	entry := func(kind string, v any) []map[string]any {
		return []map[string]any{{"name": name, kind: v}}
	}
	b, err := yaml.Marshal(map[string]any{
		"apiVersion":      "v1",
		"kind":            "Config",
		"clusters":        entry("cluster", cluster{Server: server, CA: caPEM}),
		"users":           entry("user", user{Cert: EncodeCerts(cert.Raw), Key: k}),
		"contexts":        entry("context", context{Cluster: name, User: name}),
		"current-context": name,
	})
	if err != nil {
		return nil, fmt.Errorf("pki: kubeconfig: %w", err)
	}
	return b, nil
}

// OtherClusterError says that a kubeconfig is another cluster's. It holds the
// only administrator's key that some clusters have, so it is not overwritten.
type OtherClusterError struct{ Path string }

// Error implements error.
func (e *OtherClusterError) Error() string {
	return fmt.Sprintf("%s is the administrator's kubeconfig of another cluster and was left as it is: move it away (or remove it, if that cluster is gone), or give this server a --config-dir of its own", e.Path)
}

// CheckAdminKubeconfig returns an *OtherClusterError if the file at path
// trusts another authority than this one. A file that is missing, or that is
// no kubeconfig, is fine.
func (ca *CA) CheckAdminKubeconfig(path string) error {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("pki: kubeconfig: %w", err)
	}
	var have struct {
		Clusters []struct {
			Cluster struct {
				CA []byte `json:"certificate-authority-data"`
			} `json:"cluster"`
		} `json:"clusters"`
	}
	if yaml.Unmarshal(b, &have) != nil {
		return nil //nolint:nilerr // damaged: nothing to lose
	}
	for _, c := range have.Clusters {
		if _, err := DecodeCerts(c.Cluster.CA); err != nil {
			continue // cut off
		}
		if !bytes.Equal(bytes.TrimSpace(c.Cluster.CA), bytes.TrimSpace(ca.PEM())) {
			return &OtherClusterError{Path: path}
		}
	}
	return nil
}

// WriteAdminKubeconfig issues an administrator's certificate and writes the
// kubeconfig to path, mode 0600, unless another cluster's is there
// (*OtherClusterError).
func (ca *CA) WriteAdminKubeconfig(path, server string) error {
	if err := ca.CheckAdminKubeconfig(path); err != nil {
		return err
	}
	cert, key, err := ca.IssueUser("dunlin-admin", []string{MastersGroup}, AdminLife)
	if err != nil {
		return err
	}
	b, err := Kubeconfig("dunlin", server, ca.PEM(), cert, key)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("pki: kubeconfig: %w", err)
	}
	return atomicfile.WriteRaw(path, b, 0o600)
}
