package pki

import (
	"crypto/ecdsa"
	"crypto/x509"
	"fmt"
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

// WriteAdminKubeconfig issues an administrator's certificate and writes the
// kubeconfig to path, mode 0600.
func (ca *CA) WriteAdminKubeconfig(path, server string) error {
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
