package discovery

import (
	"crypto/sha256"
	"encoding/base64"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	apidiscoveryv2beta1 "k8s.io/api/apidiscovery/v2beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// groupVersions lists the distinct group versions in order.
func groupVersions(list []Resource) []schema.GroupVersion {
	var out []schema.GroupVersion
	for i := range list {
		if gv := list[i].GroupVersion; len(out) == 0 || out[len(out)-1] != gv {
			out = append(out, gv)
		}
	}
	return out
}

// apiVersions is the answer to GET /api.
func apiVersions(address string) *metav1.APIVersions {
	return &metav1.APIVersions{
		TypeMeta: metav1.TypeMeta{Kind: "APIVersions"},
		Versions: []string{"v1"},
		ServerAddressByClientCIDRs: []metav1.ServerAddressByClientCIDR{
			{ClientCIDR: "0.0.0.0/0", ServerAddress: address},
		},
	}
}

// apiGroups lists the groups with their versions, without the core group.
func apiGroups(list []Resource) []metav1.APIGroup {
	var groups []metav1.APIGroup
	for _, gv := range groupVersions(list) {
		if gv.Group == "" {
			continue
		}
		v := metav1.GroupVersionForDiscovery{GroupVersion: gv.String(), Version: gv.Version}
		if n := len(groups); n > 0 && groups[n-1].Name == gv.Group {
			groups[n-1].Versions = append(groups[n-1].Versions, v)
			continue
		}
		groups = append(groups, metav1.APIGroup{Name: gv.Group, Versions: []metav1.GroupVersionForDiscovery{v}, PreferredVersion: v})
	}
	return groups
}

// resourceList is the answer to GET /api/v1 and /apis/G/V.
func resourceList(list []Resource, gv schema.GroupVersion) *metav1.APIResourceList {
	out := &metav1.APIResourceList{
		TypeMeta:     metav1.TypeMeta{Kind: "APIResourceList"},
		GroupVersion: gv.String(), APIResources: []metav1.APIResource{},
	}
	if gv.Group != "" {
		out.APIVersion = "v1" // upstream leaves it out for /api/v1
	}
	for i := range list {
		r := &list[i]
		if r.GroupVersion != gv {
			continue
		}
		a := metav1.APIResource{
			Name: r.Name, SingularName: r.Singular, Namespaced: r.Namespaced, Kind: r.Kind.Kind,
			Verbs: r.Verbs, ShortNames: r.ShortNames, Categories: r.Categories,
		}
		if r.Kind.GroupVersion() != gv {
			a.Group, a.Version = r.Kind.Group, r.Kind.Version
		}
		if r.Stored {
			a.StorageVersionHash = storageHash(r.storage)
		}
		out.APIResources = append(out.APIResources, a)
	}
	return out
}

// storageHash is an opaque mark of the version in which a kind is stored:
// equal hashes mean that a client's copy and the stored one have the same
// form. It is computed as upstream does.
func storageHash(gvk schema.GroupVersionKind) string {
	sum := sha256.Sum256([]byte(gvk.Group + "/" + gvk.Version + "/" + gvk.Kind))
	return base64.StdEncoding.EncodeToString(sum[:8])
}

// aggregated is the answer to GET /api (core true) or /apis for clients that
// take the whole of discovery in one document.
func aggregated(list []Resource, coreGroup bool) *apidiscoveryv2.APIGroupDiscoveryList {
	out := &apidiscoveryv2.APIGroupDiscoveryList{
		TypeMeta: metav1.TypeMeta{Kind: "APIGroupDiscoveryList", APIVersion: "apidiscovery.k8s.io/v2"},
		Items:    []apidiscoveryv2.APIGroupDiscovery{},
	}
	for _, gv := range groupVersions(list) {
		if (gv.Group == "") != coreGroup {
			continue
		}
		v := apidiscoveryv2.APIVersionDiscovery{
			Version: gv.Version, Freshness: apidiscoveryv2.DiscoveryFreshnessCurrent, Resources: aggregatedResources(list, gv),
		}
		if n := len(out.Items); n > 0 && out.Items[n-1].Name == gv.Group {
			out.Items[n-1].Versions = append(out.Items[n-1].Versions, v)
			continue
		}
		out.Items = append(out.Items, apidiscoveryv2.APIGroupDiscovery{
			ObjectMeta: metav1.ObjectMeta{Name: gv.Group}, Versions: []apidiscoveryv2.APIVersionDiscovery{v},
		})
	}
	return out
}

func aggregatedResources(list []Resource, gv schema.GroupVersion) []apidiscoveryv2.APIResourceDiscovery {
	var out []apidiscoveryv2.APIResourceDiscovery
	for i := range list {
		r := &list[i]
		if r.GroupVersion != gv {
			continue
		}
		// Group and version are left empty where they are those of the
		// document, as upstream does.
		kind := &metav1.GroupVersionKind{Kind: r.Kind.Kind}
		if r.Kind.GroupVersion() != gv {
			kind.Group, kind.Version = r.Kind.Group, r.Kind.Version
		}
		if name, sub := r.Subresource(); sub != "" {
			for j := range out {
				if out[j].Resource == name {
					out[j].Subresources = append(out[j].Subresources, apidiscoveryv2.APISubresourceDiscovery{
						Subresource: sub, ResponseKind: kind, Verbs: r.Verbs,
					})
				}
			}
			continue
		}
		scope := apidiscoveryv2.ScopeCluster
		if r.Namespaced {
			scope = apidiscoveryv2.ScopeNamespace
		}
		out = append(out, apidiscoveryv2.APIResourceDiscovery{
			Resource: r.Name, ResponseKind: kind, Scope: scope, SingularResource: r.Singular,
			Verbs: r.Verbs, ShortNames: r.ShortNames, Categories: r.Categories,
		})
	}
	return out
}

// toV2beta1 converts for clients of the years before v2.
func toV2beta1(in *apidiscoveryv2.APIGroupDiscoveryList) *apidiscoveryv2beta1.APIGroupDiscoveryList {
	out := &apidiscoveryv2beta1.APIGroupDiscoveryList{
		TypeMeta: metav1.TypeMeta{Kind: "APIGroupDiscoveryList", APIVersion: "apidiscovery.k8s.io/v2beta1"},
		Items:    []apidiscoveryv2beta1.APIGroupDiscovery{},
	}
	for _, g := range in.Items {
		ng := apidiscoveryv2beta1.APIGroupDiscovery{ObjectMeta: g.ObjectMeta}
		for _, v := range g.Versions {
			nv := apidiscoveryv2beta1.APIVersionDiscovery{Version: v.Version, Freshness: apidiscoveryv2beta1.DiscoveryFreshness(v.Freshness)}
			for _, r := range v.Resources {
				nr := apidiscoveryv2beta1.APIResourceDiscovery{
					Resource: r.Resource, ResponseKind: r.ResponseKind, Scope: apidiscoveryv2beta1.ResourceScope(r.Scope),
					SingularResource: r.SingularResource, Verbs: r.Verbs, ShortNames: r.ShortNames, Categories: r.Categories,
				}
				for _, s := range r.Subresources {
					nr.Subresources = append(nr.Subresources, apidiscoveryv2beta1.APISubresourceDiscovery{
						Subresource: s.Subresource, ResponseKind: s.ResponseKind, Verbs: s.Verbs,
					})
				}
				nv.Resources = append(nv.Resources, nr)
			}
			ng.Versions = append(ng.Versions, nv)
		}
		out.Items = append(out.Items, ng)
	}
	return out
}
