package client

import (
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

// Config is what of a kubeconfig's current context the client needs.
type Config struct {
	Path      string
	Server    string
	Namespace string
	CA        []byte // PEM
	Cert, Key []byte // PEM
	Token     string
	Insecure  bool
}

// ErrNoKubeconfig says that there is none in any of the usual places.
var ErrNoKubeconfig = errors.New("no kubeconfig found")

// AdminFile is the name of a server's kubeconfig in its configuration folder.
const AdminFile = "admin.kubeconfig"

// DefaultPaths are looked at in this order: $KUBECONFIG, the server's own on
// this machine (in configDir if one is given; else as root, then as a user),
// ~/.kube/config.
func DefaultPaths(configDir string) []string {
	var p []string
	if env := os.Getenv("KUBECONFIG"); env != "" {
		p = append(p, filepath.SplitList(env)...)
	}
	home, herr := os.UserHomeDir()
	if configDir != "" {
		p = append(p, filepath.Join(configDir, AdminFile))
	} else {
		p = append(p, filepath.Join("/etc/dunlin", AdminFile))
		if dir := os.Getenv("XDG_CONFIG_HOME"); dir != "" {
			p = append(p, filepath.Join(dir, "dunlin", AdminFile))
		}
		if herr == nil {
			p = append(p, filepath.Join(home, ".config", "dunlin", AdminFile))
		}
	}
	if herr == nil {
		p = append(p, filepath.Join(home, ".kube", "config"))
	}
	return p
}

type kubeconfigFile struct {
	CurrentContext string `json:"current-context"`
	Contexts       []struct {
		Name    string `json:"name"`
		Context struct {
			Cluster   string `json:"cluster"`
			User      string `json:"user"`
			Namespace string `json:"namespace"`
		} `json:"context"`
	} `json:"contexts"`
	Clusters []struct {
		Name    string `json:"name"`
		Cluster struct {
			Server   string `json:"server"`
			CAData   string `json:"certificate-authority-data"`
			CAFile   string `json:"certificate-authority"`
			Insecure bool   `json:"insecure-skip-tls-verify"`
		} `json:"cluster"`
	} `json:"clusters"`
	Users []struct {
		Name string `json:"name"`
		User struct {
			CertData  string `json:"client-certificate-data"`
			CertFile  string `json:"client-certificate"`
			KeyData   string `json:"client-key-data"`
			KeyFile   string `json:"client-key"`
			Token     string `json:"token"`
			TokenFile string `json:"tokenFile"`
		} `json:"user"`
	} `json:"users"`
}

// Load reads a kubeconfig; "" takes the first of DefaultPaths that exists.
func Load(path, configDir string) (*Config, error) {
	if path == "" {
		locked := ""
		for _, p := range DefaultPaths(configDir) {
			switch info, err := os.Stat(p); {
			case err == nil && !info.IsDir():
				path = p
			case errors.Is(err, os.ErrPermission) && locked == "":
				locked = p
			}
			if path != "" {
				break
			}
		}
		if path == "" && locked != "" {
			return nil, fmt.Errorf("read kubeconfig: %w: %s (this user may not look there; try sudo, or give another one with --kubeconfig)", os.ErrPermission, locked)
		}
		if path == "" {
			return nil, fmt.Errorf("%w (looked at %s); give one with --kubeconfig, or start a server here with 'dunlin server'", ErrNoKubeconfig, strings.Join(DefaultPaths(configDir), ", "))
		}
	}
	b, err := os.ReadFile(path)
	if err != nil {
		if errors.Is(err, os.ErrPermission) {
			return nil, fmt.Errorf("read kubeconfig: %w (it holds the admin's key; run as the user who owns it, or with sudo)", err)
		}
		return nil, fmt.Errorf("read kubeconfig: %w", err)
	}
	var f kubeconfigFile
	if err := yaml.Unmarshal(b, &f); err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", path, err)
	}
	c, err := f.current(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", path, err)
	}
	c.Path = path
	return c, nil
}

func (f *kubeconfigFile) current(dir string) (*Config, error) {
	c := &Config{Namespace: "default"}
	var cluster, user string
	found := false
	for _, x := range f.Contexts {
		if x.Name == f.CurrentContext {
			cluster, user, found = x.Context.Cluster, x.Context.User, true
			if x.Context.Namespace != "" {
				c.Namespace = x.Context.Namespace
			}
		}
	}
	if !found {
		return nil, fmt.Errorf("current-context %q is not among its contexts", f.CurrentContext)
	}
	var errs []error
	read := func(data, file string) []byte {
		if data != "" {
			b, err := base64.StdEncoding.DecodeString(data)
			errs = append(errs, err)
			return b
		}
		if file == "" {
			return nil
		}
		if !filepath.IsAbs(file) {
			file = filepath.Join(dir, file)
		}
		b, err := os.ReadFile(file)
		errs = append(errs, err)
		return b
	}
	for _, x := range f.Clusters {
		if x.Name == cluster {
			c.Server, c.Insecure = x.Cluster.Server, x.Cluster.Insecure
			c.CA = read(x.Cluster.CAData, x.Cluster.CAFile)
		}
	}
	for _, x := range f.Users {
		if x.Name == user {
			c.Cert, c.Key = read(x.User.CertData, x.User.CertFile), read(x.User.KeyData, x.User.KeyFile)
			c.Token = x.User.Token
			if c.Token == "" && x.User.TokenFile != "" {
				c.Token = strings.TrimSpace(string(read("", x.User.TokenFile)))
			}
		}
	}
	if c.Server == "" {
		return nil, fmt.Errorf("its cluster %q has no server", cluster)
	}
	if !strings.Contains(c.Server, "://") {
		c.Server = "https://" + c.Server
	}
	return c, errors.Join(errs...)
}
