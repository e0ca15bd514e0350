package controlplane

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/pki"
)

// issuer loads or makes the key that signs ServiceAccount tokens.
func (s *Server) issuer(dir string) (*auth.Issuer, error) {
	key, damaged, err := loadOrCreateKey(filepath.Join(dir, "service-account.key"))
	if err != nil {
		return nil, err
	}
	if damaged != "" {
		s.log.Error("the key that signs the tokens of ServiceAccounts was damaged and is a new one: pods are given new tokens, those of before are refused", "damaged", damaged,
			"hint", "where there are further servers, this one has to join anew ('dunlin server --help'), since theirs is another")
	}
	return auth.NewIssuer(auth.IssuerConfig{Key: key, Clock: s.cfg.Clock})
}

// loadOrCreateKey reads a key from either of two copies, or makes one. damaged
// is where the file went that had to be replaced by a new key.
func loadOrCreateKey(path string) (key *ecdsa.PrivateKey, damaged string, err error) {
	copies := []string{path, path + ".copy"}
	var bad []string // to be written
	for _, p := range copies {
		k, err := readKey(p)
		if err != nil {
			return nil, "", err
		}
		if key == nil {
			key = k
		}
		if k == nil || !k.Equal(key) {
			bad = append(bad, p)
		}
	}
	if key == nil {
		for _, p := range copies {
			moved, err := atomicfile.Quarantine(p)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, "", err
			}
			if err == nil && damaged == "" {
				damaged = moved
			}
		}
		if key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
			return nil, "", fmt.Errorf("make key: %w", err)
		}
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, "", fmt.Errorf("encode key: %w", err)
	}
	for _, p := range bad {
		if err := atomicfile.WriteRaw(p, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), 0o600); err != nil {
			return nil, "", err
		}
	}
	return key, damaged, nil
}

// readKey reads a key; nil is none, or none that can be read.
func readKey(path string) (*ecdsa.PrivateKey, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read key: %w", err)
	}
	if block, _ := pem.Decode(b); block != nil {
		if k, err := x509.ParseECPrivateKey(block.Bytes); err == nil {
			return k, nil
		}
	}
	return nil, nil
}

// loadKeys reads what nothing else can replace, the authority and the key that
// seals Secrets, or makes them for a cluster that is new. Where there is a
// state they are never made: every node, client and Secret is of the old ones.
func loadKeys(cfg Config, id identity, c clock.Clock) (*pki.CA, *registry.Sealer, error) {
	dir := filepath.Join(cfg.StateDir, "pki")
	raft, err := os.ReadDir(filepath.Join(cfg.StateDir, "raft"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("read state folder: %w", err)
	}
	held := len(raft) > 0
	load := pki.LoadOrCreateCA
	if held {
		load = func(dir, _ string, c clock.Clock) (*pki.CA, error) { return pki.LoadCA(dir, c) }
	}
	ca, err := load(dir, id.cluster, c)
	if errors.Is(err, pki.ErrNoCA) {
		err = fmt.Errorf("%w, %s, though %s has the state of a cluster: restore the folder from a backup; nothing was changed", err, dir, cfg.StateDir)
	}
	if err != nil {
		return nil, nil, err
	}
	sealer, err := loadSealer(filepath.Join(dir, "seal.key"), !held || cfg.NewSealKey)
	return ca, sealer, err
}

// ErrNoSealKey says that the key that sealed the Secrets of a state is gone.
var ErrNoSealKey = errors.New("the key that seals Secrets is missing or damaged, though there is the state of a cluster")

// loadSealer reads the key that seals Secrets, or makes it where it may. It
// lies beside the state and never passes through Raft, so that log, snapshots
// and backups hold no Secret in clear. It is kept twice: without it the Secrets
// are lost.
func loadSealer(path string, create bool) (*registry.Sealer, error) {
	copies := []string{path, path + ".copy"}
	key, good, err := readCopies(copies, registry.SealKeySize)
	if err != nil {
		return nil, fmt.Errorf("seal key: %w", err)
	}
	if key == nil && !create {
		return nil, fmt.Errorf("%w: restore %s from a backup, or take that of another server of the cluster; if it is lost, --new-seal-key makes another, and the Secrets of before can then only be deleted", ErrNoSealKey, path)
	}
	if key == nil {
		key = make([]byte, registry.SealKeySize)
		if _, err := rand.Read(key); err != nil {
			return nil, fmt.Errorf("random: %w", err)
		}
	}
	for i := 0; good < len(copies) && i < len(copies); i++ {
		if err := atomicfile.Write(copies[i], key, 0o600); err != nil {
			return nil, fmt.Errorf("seal key: %w", err)
		}
	}
	return registry.NewSealer(key)
}

// readSealKey reads the key from one of its copies.
func readSealKey(path string) ([]byte, error) {
	key, _, err := readCopies([]string{path, path + ".copy"}, registry.SealKeySize)
	if err == nil && key == nil {
		err = fs.ErrNotExist
	}
	if err != nil {
		return nil, fmt.Errorf("seal key: %w", err)
	}
	return key, nil
}

// readCopies reads a record of a known size that is kept more than once; good
// says how many copies are. nil is none.
func readCopies(copies []string, size int) (found []byte, good int, err error) {
	for _, p := range copies {
		b, err := atomicfile.Read(p)
		switch {
		case err == nil && len(b) == size:
			found = b
			good++
		case err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, atomicfile.ErrCorrupt):
			return nil, 0, err
		}
	}
	return found, good, nil
}

// loadIdentity reads or makes the ids of this server and of a new cluster.
// They are kept twice, since nothing else can replace them.
func loadIdentity(dir string) (identity, error) {
	copies := identityFiles(dir)
	found, good, err := readCopies(copies, 64)
	if err != nil {
		return identity{}, fmt.Errorf("server id: %w", err)
	}
	if found == nil {
		var r [32]byte
		if _, err := rand.Read(r[:]); err != nil {
			return identity{}, fmt.Errorf("random: %w", err)
		}
		found = []byte(hex.EncodeToString(r[:]))
	}
	id := identity{server: string(found[:32]), cluster: string(found[32:])}
	if good == len(copies) {
		return id, nil
	}
	return id, saveIdentity(dir, id)
}

func identityFiles(dir string) []string {
	return []string{filepath.Join(dir, "server-id"), filepath.Join(dir, "server-id.copy")}
}

// hasIdentity says whether the folder is a server's already.
func hasIdentity(dir string) (bool, error) {
	found, _, err := readCopies(identityFiles(dir), 64)
	return found != nil, err
}

func saveIdentity(dir string, id identity) error {
	for _, p := range identityFiles(dir) {
		if err := atomicfile.Write(p, []byte(id.server+id.cluster), 0o600); err != nil {
			return fmt.Errorf("server id: %w", err)
		}
	}
	return nil
}
