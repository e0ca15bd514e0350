package ingress

import (
	"bytes"
	"crypto/tls"
	"slices"
	"strings"

	"github.com/dunlin-project/dunlin/wire"
)

// itemCertificate is the prefix of the keys of Certificates in the feed:
// t/NAMESPACE/NAME of the Secret.
const itemCertificate = "t/"

// Certificate is a Secret's, in PEM.
type Certificate struct {
	Cert []byte `cbor:"1,keyasint"`
	Key  []byte `cbor:"2,keyasint"`
}

// held is a certificate that was read.
type held struct {
	data []byte
	pair *tls.Certificate // of an earlier data, while this one cannot be read
	err  error
}

// take reads a certificate. While the new one cannot be used, the one before
// stays.
func (h *held) take(data []byte) {
	if bytes.Equal(h.data, data) {
		return
	}
	h.data = data
	var c Certificate
	if h.err = wire.DecodeItem(data, &c); h.err != nil {
		return
	}
	pair, err := tls.X509KeyPair(c.Cert, c.Key)
	if h.err = err; err == nil {
		h.pair = &pair
	}
}

// certificates are chosen by the name that a client asks for. Immutable.
type certificates struct {
	byHost map[string]*tls.Certificate
	other  *tls.Certificate // for names that have no other
}

func newCertificates(list []named, secrets map[string]*held) *certificates {
	out := &certificates{byHost: map[string]*tls.Certificate{}}
	slices.SortFunc(list, older)
	for _, ing := range list {
		for _, t := range ing.TLS {
			h := secrets[ing.namespace+"/"+t.Secret]
			if h == nil || h.pair == nil {
				continue
			}
			if len(t.Hosts) == 0 && out.other == nil {
				out.other = h.pair
			}
			for _, host := range t.Hosts {
				if host = strings.ToLower(host); out.byHost[host] == nil {
					out.byHost[host] = h.pair
				}
			}
		}
	}
	return out
}

// of is the certificate for a name; nil is none, and the handshake is refused.
func (c *certificates) of(host string) *tls.Certificate {
	if pair, ok := lookup(c.byHost, strings.ToLower(strings.TrimSuffix(host, "."))); ok {
		return pair
	}
	return c.other
}
