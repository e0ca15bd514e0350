package registry

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Config is registries.yaml, in the form that k3s and RKE2 made known.
type Config struct {
	// Mirrors are asked before a registry, by the registry's name; "*" is for
	// all that have no entry of their own.
	Mirrors map[string]Mirror `yaml:"mirrors"`
	// Configs say how a host is spoken to, by its name and port.
	Configs map[string]Host `yaml:"configs"`
}

// Mirror lists where a registry's images are, best first. The registry itself
// is asked last, unless it is in the list.
type Mirror struct {
	Endpoint []string `yaml:"endpoint"` // "https://mirror.lan:5000", or "http://..." for one without TLS
}

// Host is how one host is spoken to.
type Host struct {
	Auth struct {
		Username string `yaml:"username"`
		Password string `yaml:"password"`
		Token    string `yaml:"identity_token"`
	} `yaml:"auth"`
	TLS struct {
		CAFile             string `yaml:"ca_file"`
		CertFile           string `yaml:"cert_file"`
		KeyFile            string `yaml:"key_file"`
		InsecureSkipVerify bool   `yaml:"insecure_skip_verify"`
	} `yaml:"tls"`
}

// LoadConfig reads the file strictly; a file that does not exist says nothing.
func LoadConfig(path string) (Config, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Config{}, nil
	}
	if err != nil {
		return Config{}, fmt.Errorf("registries: %w", err)
	}
	c, err := ParseConfig(b)
	if err != nil {
		return Config{}, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

// ParseConfig reads the file's content.
func ParseConfig(b []byte) (c Config, err error) {
	d := yaml.NewDecoder(bytes.NewReader(b))
	d.KnownFields(true)
	if err := d.Decode(&c); err != nil && !errors.Is(err, io.EOF) {
		return c, fmt.Errorf("%s", strings.ReplaceAll(err.Error(), "\n", ""))
	}
	if err := d.Decode(&struct{}{}); err == nil || !errors.Is(err, io.EOF) {
		return c, errors.New("there is more than one document in it")
	}
	for name, m := range c.Mirrors {
		if strings.Contains(name, "/") {
			return c, fmt.Errorf("mirrors: %q: write the registry's name as in images, without https://", name)
		}
		for _, e := range m.Endpoint {
			u, err := url.Parse(e)
			if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil || u.RawQuery != "" {
				return c, fmt.Errorf("mirrors: %s: endpoint %q is not https://HOST[:PORT] (or http://)", name, e)
			}
		}
	}
	for name, h := range c.Configs {
		if strings.Contains(name, "/") {
			return c, fmt.Errorf("configs: %q: write HOST[:PORT], without https://", name)
		}
		if _, err := h.tlsConfig(); err != nil {
			return c, fmt.Errorf("configs: %s: %w", name, err)
		}
	}
	return c, nil
}

func (h Host) tlsConfig() (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: h.TLS.InsecureSkipVerify} //nolint:gosec // the operator asked for it
	if h.TLS.CAFile != "" {
		pem, err := os.ReadFile(h.TLS.CAFile)
		if err != nil {
			return nil, fmt.Errorf("ca_file: %w", err)
		}
		if c.RootCAs, err = x509.SystemCertPool(); err != nil {
			c.RootCAs = x509.NewCertPool()
		}
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("ca_file: %s holds no certificate", h.TLS.CAFile)
		}
	}
	if (h.TLS.CertFile == "") != (h.TLS.KeyFile == "") {
		return nil, errors.New("cert_file and key_file belong together")
	}
	if h.TLS.CertFile != "" {
		cert, err := tls.LoadX509KeyPair(h.TLS.CertFile, h.TLS.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("cert_file: %w", err)
		}
		c.Certificates = []tls.Certificate{cert}
	}
	return c, nil
}

// endpoint is one place that has a registry's images.
type endpoint struct {
	base   string // "https://host:port/v2" or with the mirror's own path
	host   string
	mirror bool
}

const (
	dockerHub     = "docker.io"
	dockerHubHost = "registry-1.docker.io"
)

// endpoints lists where to ask for a registry's images.
func (c *Config) endpoints(registry string) (out []endpoint) {
	m, ok := c.Mirrors[registry]
	if !ok {
		m = c.Mirrors["*"]
	}
	host := registry
	if registry == dockerHub {
		host = dockerHubHost
	}
	for _, e := range m.Endpoint {
		u, err := url.Parse(e)
		if err != nil {
			continue // ParseConfig refuses them
		}
		base := strings.TrimRight(u.Scheme+"://"+u.Host+u.Path, "/")
		if !strings.HasSuffix(base, "/v2") {
			base += "/v2"
		}
		out = append(out, endpoint{base: base, host: u.Host, mirror: u.Host != host})
	}
	if slices.ContainsFunc(out, func(e endpoint) bool { return !e.mirror }) {
		return out
	}
	scheme := "https"
	if isLoopback(host) {
		scheme = "http" // as docker and containerd do
	}
	return append(out, endpoint{base: scheme + "://" + host + "/v2", host: host})
}

func isLoopback(host string) bool {
	h, _, err := net.SplitHostPort(host)
	if err != nil {
		h = host
	}
	ip := net.ParseIP(strings.Trim(h, "[]"))
	return h == "localhost" || ip != nil && ip.IsLoopback()
}
