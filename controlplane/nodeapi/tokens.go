package nodeapi

import (
	"cmp"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/wire"
)

// autoExpiration is the life that admission writes into the volume it adds
// to pods; upstream's API server, too, takes it as "long, since nobody asked
// for short" (there a year). Tokens are bound to their pod and end with it;
// a short life would have every node write its flash every hour.
const (
	autoExpiration = 3607
	autoLife       = 30 * 24 * time.Hour
)

// SecretTypeToken marks the Secret-like objects of an assignment that hold
// ServiceAccount tokens; they exist nowhere else.
const SecretTypeToken corev1.SecretType = "dunlin.dev/projected-token"

// tokenWant is one serviceAccountToken source of a pod's volume.
type tokenWant struct {
	uid      string // of the object in the assignment
	account  string
	audience string
	life     time.Duration
}

func podTokens(pod *corev1.Pod) []tokenWant {
	var out []tokenWant
	for i := range pod.Spec.Volumes {
		p := pod.Spec.Volumes[i].Projected
		if p == nil {
			continue
		}
		for _, src := range p.Sources {
			t := src.ServiceAccountToken
			if t == nil {
				continue
			}
			exp := int64(0)
			if t.ExpirationSeconds != nil {
				exp = *t.ExpirationSeconds
			}
			life := time.Duration(cmp.Or(exp, 3600)) * time.Second
			if exp == autoExpiration {
				life = autoLife
			}
			out = append(out, tokenWant{
				uid:     wire.TokenSecretName(string(pod.UID), t.Audience, exp),
				account: cmp.Or(pod.Spec.ServiceAccountName, "default"), audience: t.Audience, life: life,
			})
		}
	}
	return out
}

// due says whether a token shall be replaced: after 80 % of its life, as
// upstream's kubelet does.
func (w tokenWant) due(expires int64, now time.Time) bool {
	left := time.Unix(expires, 0).Sub(now)
	return left < w.life/5 || left > 2*w.life
}

// adopt takes over the tokens that the node says it holds, so that a
// restarted server neither issues them again nor changes the generation.
func (n *nodeState) adopt(have map[string]uint64, now time.Time) {
	if again := n.again.Swap(false); n.adopted && !again {
		return
	}
	n.adopted = true
	for uid, version := range have {
		if len(uid) > len("token.") && uid[:len("token.")] == "token." && n.tokens[uid] == 0 && time.Unix(int64(version), 0).After(now) {
			n.tokens[uid] = int64(version)
		}
	}
}

// eachToken calls f for every token that the pods of the assignment want.
func (n *nodeState) eachToken(f func(pod *state.Record, w *tokenWant)) {
	for i := range n.order {
		e := &n.order[i]
		for j := range e.tokens {
			if !e.skip {
				f(e.rec, &e.tokens[j])
			}
		}
	}
}

// refreshTokens makes n.tokens be exactly what the pods want and not due. It
// decides only until when each is good; they are signed when they are sent,
// and not kept: for a hundred thousand pods that would be a hundred
// megabytes, and an answer that is lost costs one more signature.
func (a *assigner) refreshTokens(n *nodeState) {
	next := make(map[string]int64, len(n.tokens))
	if a.s.cfg.Tokens == nil {
		n.tokens = next
		return
	}
	now := a.s.cfg.Clock.Now()
	n.eachToken(func(pod *state.Record, w *tokenWant) {
		expires := n.tokens[w.uid]
		if expires == 0 || w.due(expires, now) {
			if !n.adopted {
				return // the node may hold it: it says so with its first pull
			}
			if _, err := a.account(pod, w); err != nil {
				a.noToken(pod, err)
				return
			}
			expires = now.Add(w.life).Unix()
		}
		next[w.uid] = expires
	})
	n.tokens = next
}

func (a *assigner) account(pod *state.Record, w *tokenWant) (*corev1.ServiceAccount, error) {
	obj, err := a.s.cfg.Store.Get(serviceAccountGK, pod.Header.Key.Namespace, w.account)
	if err != nil {
		return nil, err
	}
	sa, ok := obj.(*corev1.ServiceAccount)
	if !ok {
		return nil, fmt.Errorf("nodeapi: ServiceAccount %s is a %T", w.account, obj)
	}
	return sa, nil
}

func (a *assigner) noToken(pod *state.Record, err error) {
	k := &pod.Header.Key
	a.s.warn("token", k.Namespace+"/"+k.Name, "service account token not issued", err)
}

func (a *assigner) sign(node *auth.Ref, pod *state.Record, w *tokenWant, life time.Duration) ([]byte, error) {
	sa, err := a.account(pod, w)
	if err != nil {
		return nil, err
	}
	bound := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Header.Key.Namespace, Name: pod.Header.Key.Name, UID: types.UID(pod.Header.UID)},
		Spec:       corev1.PodSpec{NodeName: node.Name},
	}
	var aud []string
	if w.audience != "" {
		aud = []string{w.audience}
	}
	value, _, err := a.s.cfg.Tokens.Issue(sa, bound, node, aud, life)
	return []byte(value), err
}

// sendTokens adds the tokens that the node does not hold to an answer.
func (a *assigner) sendTokens(n *nodeState, have map[string]uint64, out *wire.Assignment) error {
	node := &auth.Ref{Name: n.name}
	if obj, err := a.s.getNode(n.name); err == nil {
		node.UID = string(obj.UID)
	}
	now := a.s.cfg.Clock.Now().Truncate(time.Second) // as the issuer does
	var failed error
	n.eachToken(func(pod *state.Record, w *tokenWant) {
		expires := n.tokens[w.uid]
		switch {
		case expires == 0 || failed != nil:
			return
		case have[w.uid] == uint64(expires):
			out.Keep = append(out.Keep, w.uid)
			return
		}
		value, err := a.sign(node, pod, w, time.Unix(expires, 0).Sub(now))
		if err != nil {
			a.noToken(pod, err)
			return
		}
		namespace := pod.Header.Key.Namespace
		data, err := direct.Marshal(&corev1.Secret{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"},
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: w.uid, UID: types.UID(w.uid)},
			Type:       SecretTypeToken,
			Data:       map[string][]byte{corev1.ServiceAccountTokenKey: value},
		})
		if err != nil {
			failed = fmt.Errorf("nodeapi: encode token: %w", err)
			return
		}
		out.Objects = append(out.Objects, wire.Object{
			Ref: wire.Ref{Kind: "Secret", Namespace: namespace, Name: w.uid},
			UID: w.uid, ResourceVersion: uint64(expires), Data: data,
		})
	})
	return failed
}
