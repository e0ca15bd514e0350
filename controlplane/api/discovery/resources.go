package discovery

import (
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/manifests"
)

// Resource is one thing that is served: a resource ("pods"), a sub-resource
// ("pods/log") or a virtual resource that stores nothing
// ("selfsubjectaccessreviews").
type Resource struct {
	// GroupVersion is where it is served.
	GroupVersion schema.GroupVersion
	// Name is the plural, or plural/sub-resource.
	Name string
	// Kind is what it takes and returns; often of another group than where it
	// is served (pods/eviction takes a policy/v1 Eviction).
	Kind       schema.GroupVersionKind
	Singular   string
	ShortNames []string
	Categories []string
	Namespaced bool
	Verbs      []string // sorted
	// Stored: objects of it are kept; it has a storage version.
	Stored bool
	// storage names the kind whose storage it is a view of, for the hash.
	storage schema.GroupVersionKind
}

// Subresource splits the name.
func (r *Resource) Subresource() (resource, sub string) {
	resource, sub, _ = strings.Cut(r.Name, "/")
	return resource, sub
}

// Features are the sub-resources that exist only once their part of the
// server does. What is false is not advertised.
type Features struct {
	Streams             bool // pods/exec, pods/attach, pods/portforward, pods/proxy, services/proxy
	EphemeralContainers bool // pods/ephemeralcontainers
	Resize              bool // pods/resize
	Usage               bool // metrics.k8s.io
}

var (
	readWrite   = []string{"create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"}
	noDeleteAll = []string{"create", "delete", "get", "list", "patch", "update", "watch"}
	getChange   = []string{"get", "patch", "update"}
	createOnly  = []string{"create"}
	getOnly     = []string{"get"}
	getList     = []string{"get", "list"}
	updateOnly  = []string{"update"}
	stream      = []string{"create", "get"}
	proxied     = []string{"create", "delete", "get", "patch", "update"}
)

// Groups and kinds that no table entry of manifests names.
var (
	core    = schema.GroupVersion{Version: "v1"}
	authnV1 = schema.GroupVersion{Group: "authentication.k8s.io", Version: "v1"}
	authzV1 = schema.GroupVersion{Group: "authorization.k8s.io", Version: "v1"}
	// metricsV1beta1 is where metrics-server serves what nodes and pods use.
	metricsV1beta1 = schema.GroupVersion{Group: "metrics.k8s.io", Version: "v1beta1"}

	scaleKind     = schema.GroupVersionKind{Group: "autoscaling", Version: "v1", Kind: "Scale"}
	evictionKind  = schema.GroupVersionKind{Group: "policy", Version: "v1", Kind: "Eviction"}
	tokenRequest  = authnV1.WithKind("TokenRequest")
	bindingKind   = core.WithKind("Binding")
	execOptions   = core.WithKind("PodExecOptions")
	attachOptions = core.WithKind("PodAttachOptions")
	portOptions   = core.WithKind("PodPortForwardOptions")
	podProxy      = core.WithKind("PodProxyOptions")
	serviceProxy  = core.WithKind("ServiceProxyOptions")
)

// Resources lists everything that is served, sorted by group version (in
// discovery order) and name.
func Resources(f Features) []Resource {
	var list []Resource
	for _, k := range manifests.Kinds() {
		list = append(list, kindResources(k, f)...)
	}
	list = append(list, virtual()...)
	if f.Usage {
		for _, k := range []string{"Node", "Pod"} {
			list = append(list, Resource{
				GroupVersion: metricsV1beta1, Name: strings.ToLower(k) + "s", Kind: metricsV1beta1.WithKind(k + "Metrics"),
				Namespaced: k == "Pod", Verbs: getList,
			})
		}
	}
	slices.SortStableFunc(list, func(a, b Resource) int {
		if c := compareGroups(a.GroupVersion, b.GroupVersion); c != 0 {
			return c
		}
		return strings.Compare(a.Name, b.Name)
	})
	return list
}

// kindResources are a kind's resource and sub-resources.
func kindResources(k *manifests.Kind, f Features) []Resource {
	main := Resource{
		GroupVersion: k.GVK.GroupVersion(), Name: k.Resource, Kind: k.GVK, Singular: k.Singular,
		ShortNames: k.ShortNames, Categories: k.Categories, Namespaced: k.Namespaced,
		Verbs: readWrite, Stored: true, storage: k.GVK,
	}
	if k.AliasOf.Kind != "" {
		if of := manifests.ByGroupKind(k.AliasOf); of != nil {
			main.storage = of.GVK
		}
	}
	list := []Resource{main}
	sub := func(name string, kind schema.GroupVersionKind, verbs []string) {
		list = append(list, Resource{
			GroupVersion: main.GroupVersion, Name: k.Resource + "/" + name, Kind: kind,
			Namespaced: k.Namespaced, Verbs: verbs,
		})
	}
	if k.Status {
		sub("status", k.GVK, getChange)
	}
	if k.Scale {
		sub("scale", scaleKind, getChange)
	}
	if k.GVK.Group != "" {
		return list
	}
	switch k.GVK.Kind {
	case "Namespace":
		list[0].Verbs = noDeleteAll
		sub("finalize", k.GVK, updateOnly)
	case "Pod":
		sub("binding", bindingKind, createOnly)
		sub("eviction", evictionKind, createOnly)
		sub("log", k.GVK, getOnly)
		if f.Streams {
			sub("attach", attachOptions, stream)
			sub("exec", execOptions, stream)
			sub("portforward", portOptions, stream)
			sub("proxy", podProxy, proxied)
		}
		if f.EphemeralContainers {
			sub("ephemeralcontainers", k.GVK, getChange)
		}
		if f.Resize {
			sub("resize", k.GVK, getChange)
		}
	case "Service":
		if f.Streams {
			sub("proxy", serviceProxy, proxied)
		}
	case "ServiceAccount":
		sub("token", tokenRequest, createOnly)
	}
	return list
}

// virtual are the resources that store nothing: an answer is computed from
// what is posted.
func virtual() []Resource {
	v := func(gv schema.GroupVersion, kind string, namespaced bool) Resource {
		singular := strings.ToLower(kind)
		return Resource{
			GroupVersion: gv, Name: singular + "s", Kind: gv.WithKind(kind), Singular: singular,
			Namespaced: namespaced, Verbs: createOnly,
		}
	}
	return []Resource{
		v(core, "Binding", true),
		v(authnV1, "SelfSubjectReview", false),
		v(authnV1, "TokenReview", false),
		v(authzV1, "LocalSubjectAccessReview", true),
		v(authzV1, "SelfSubjectAccessReview", false),
		v(authzV1, "SelfSubjectRulesReview", false),
		v(authzV1, "SubjectAccessReview", false),
	}
}

// groupOrder is upstream's order of groups in discovery: clients that find a
// short name or a kind in two groups take the first. Groups that are not
// listed come last, by name.
var groupOrder = []string{
	"", "apps", "events.k8s.io", "authentication.k8s.io", "authorization.k8s.io", "autoscaling", "batch",
	"certificates.k8s.io", "networking.k8s.io", "policy", "rbac.authorization.k8s.io", "storage.k8s.io",
	"admissionregistration.k8s.io", "apiextensions.k8s.io", "scheduling.k8s.io", "coordination.k8s.io",
	"node.k8s.io", "discovery.k8s.io",
}

func compareGroups(a, b schema.GroupVersion) int {
	ia, ib := slices.Index(groupOrder, a.Group), slices.Index(groupOrder, b.Group)
	switch {
	case a.Group == b.Group:
		// Every group has one version so far; newer first among stable ones.
		return -strings.Compare(a.Version, b.Version)
	case ia < 0 && ib < 0:
		return strings.Compare(a.Group, b.Group)
	case ia < 0:
		return 1
	case ib < 0:
		return -1
	}
	return ia - ib
}
