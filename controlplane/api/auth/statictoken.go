package auth

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
)

// StaticToken is one entry of the token file. Only the hash is kept: tokens
// are random and long, so a plain SHA-256 cannot be guessed back.
type StaticToken struct {
	SHA256 [sha256.Size]byte
	User   string
	Groups []string
}

// maxTokenFile bounds the token file, bytes.
const maxTokenFile = 1 << 20

// HashToken is how a token stands in the token file.
func HashToken(token string) string {
	sum := sha256.Sum256([]byte(token))
	return "sha256:" + hex.EncodeToString(sum[:])
}

// ParseTokenFile reads a token file: one token a line, as
//
//	sha256:<64 hex digits> <user> <group>[,<group>...]
//
// Empty lines and lines that start with # are skipped. Errors name the line.
func ParseTokenFile(data []byte) ([]StaticToken, error) {
	if len(data) > maxTokenFile {
		return nil, fmt.Errorf("auth: token file: %d bytes, more than %d", len(data), maxTokenFile)
	}
	var list []StaticToken
	sc := bufio.NewScanner(bytes.NewReader(data))
	for n := 1; sc.Scan(); n++ {
		line := strings.TrimSpace(sc.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		f := strings.Fields(line)
		if len(f) < 2 || len(f) > 3 {
			return nil, fmt.Errorf("auth: token file line %d: want \"sha256:<hex> <user> [<group>,...]\"", n)
		}
		sum, ok := strings.CutPrefix(f[0], "sha256:")
		raw, err := hex.DecodeString(sum)
		if !ok || err != nil || len(raw) != sha256.Size {
			return nil, fmt.Errorf("auth: token file line %d: the first word is not a sha256:<64 hex digits> hash (never put the token itself into the file)", n)
		}
		t := StaticToken{SHA256: [sha256.Size]byte(raw), User: f[1]}
		if len(f) == 3 {
			for g := range strings.SplitSeq(f[2], ",") {
				if g != "" {
					t.Groups = append(t.Groups, g)
				}
			}
		}
		list = append(list, t)
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("auth: token file: %w", err)
	}
	return list, nil
}

type staticTokens map[[sha256.Size]byte]*User

// StaticTokens checks tokens against the entries. Lookup is by the hash of
// what was presented, so its timing tells nothing about the tokens.
func StaticTokens(list []StaticToken) Tokens {
	m := make(staticTokens, len(list))
	for _, t := range list {
		m[t.SHA256] = &User{Name: t.User, Groups: authenticated(slices.Clone(t.Groups))}
	}
	return m
}

// AuthenticateToken implements Tokens. Static tokens are for the API server
// only: they answer for no foreign audience.
func (m staticTokens) AuthenticateToken(token string, audiences []string) (*User, []string, bool, error) {
	u, ok := m[sha256.Sum256([]byte(token))]
	if !ok {
		return nil, nil, false, nil
	}
	if len(audiences) > 0 && !slices.Contains(audiences, DefaultAudience) {
		return nil, nil, false, fmt.Errorf("auth: the token of %q is not for the audiences %q", u.Name, audiences)
	}
	return u, []string{DefaultAudience}, true, nil
}
